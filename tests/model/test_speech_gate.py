"""What passes over segments that do not sound like speech: drops them whole, and keeps the order of all else."""

import math
from collections.abc import Iterable
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from mocha_model.emissions import Emission, SpeechGate, text_of
from mocha_model.recognizer import LEAST_EVIDENCE, Recognizer, joint_search, live_joint
from mocha_server.engine import model_info
from mocha_server.messages import Segment
from mocha_server.transcript import Transcript

LIKELY, UNLIKELY = 0.9, math.exp(-3)  # q of each character: evidence of about 0 and of -3


def said(*words: tuple[str, float], start: int = 0) -> list[Emission]:
    """A segment of words, each with the q of its characters, and its end; p is 1."""
    text = [(c, q) for word, q in words for c in f"{word} "]
    symbols = [Emission(c, start + n, 1.0, q, False, ()) for n, (c, q) in enumerate(text)]
    return [*symbols, Emission("", start + len(symbols), 0.0, 1.0, True, ())]


def passed(emissions: Iterable[Emission], least: float = LEAST_EVIDENCE) -> list[Emission]:
    return SpeechGate(least).push(emissions)


def test_a_segment_of_unlikely_words_is_dropped_and_its_end_is_not():
    noise, speech = said(("oh", UNLIKELY), ("no", UNLIKELY)), said(("yes", LIKELY), start=20)
    assert passed(noise + speech) == [noise[-1], *speech]
    assert passed(speech + noise) == [*speech, noise[-1]]
    assert text_of(passed(noise + noise)) == ""


def test_words_count_on_average_and_likely_ones_bring_with_them_what_was_held():
    mixed = said(("oh", UNLIKELY), ("yes", LIKELY), ("well", UNLIKELY), ("no", UNLIKELY))
    gate = SpeechGate(LEAST_EVIDENCE)
    assert gate.push(mixed[:6]) == []  # "oh yes", but not that the word ends there
    assert gate.push(mixed[6:7]) == mixed[:7]
    assert gate.push(mixed[7:]) == mixed[7:]  # what has been let through is never taken back, nor cut short
    assert gate.push(said(("oh", UNLIKELY))[:-1]) == []  # each segment for itself
    edge = said(("a", math.exp(LEAST_EVIDENCE)))
    assert passed(edge, LEAST_EVIDENCE) == edge
    assert passed(edge, LEAST_EVIDENCE + 0.01) == edge[-1:]


def test_a_word_that_ends_with_its_segment_counts():
    whole = said(("yes", LIKELY))
    unended = [e for e in whole if e.text != " "]
    assert passed(unended) == unended


def test_how_emissions_are_cut_makes_no_difference():
    all_ = said(("oh", UNLIKELY), ("yes", LIKELY), ("no", UNLIKELY)) + said(("oh", UNLIKELY)) + said(("yes", LIKELY))
    for size in range(1, len(all_)):
        gate = SpeechGate(LEAST_EVIDENCE)
        cuts = pairwise([*range(0, len(all_), size), len(all_)])
        assert [e for a, b in cuts for e in gate.push(all_[a:b])] == passed(all_)


def test_live_text_is_held_back_by_nothing(bundled: Recognizer):
    found = joint_search(bundled.config, bundled.tokenizer, 8)
    assert found is not None and found[0].least_evidence == LEAST_EVIDENCE
    assert live_joint(found[0], 22).least_evidence == bundled.least_evidence == -math.inf
    for emission in said(("oh", UNLIKELY)):
        assert SpeechGate(-math.inf).push([emission]) == [emission]


def test_a_file_has_no_segment_of_unlikely_words_and_all_of_its_speech(bundled: Recognizer, clip: NDArray[np.int16]):
    files = bundled.searching(32)
    emissions = files.transcribe(torch.from_numpy(clip / np.float32(32768)))
    last = emissions[-1].frame + 1
    transcript = Transcript(model_info(files))
    messages = transcript.push(said(("oh", UNLIKELY)) + emissions + said(("no", UNLIKELY), start=last), len(clip))
    segments = [message for message in messages if isinstance(message, Segment)]
    assert [segment.segment for segment in segments] == list(range(len(segments)))
    assert " ".join(segment.text for segment in segments) == text_of(emissions) != ""
