"""Settled segments: live text is greedy search's, and each segment ends with what joint search makes of it."""

import random
import wave
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.model.test_beam import sound
from torch import Tensor

from mocha_model.emissions import Emission, text_of
from mocha_model.joint import JointConfig
from mocha_model.phrases import PhraseBook
from mocha_model.recognizer import Recognizer
from mocha_model.streaming import state_bytes

FIXTURES = Path(__file__).parents[1] / "fixtures"
Told = list[tuple[str, int, bool, bool]]


def speech(*names: str, pause_s: float = 2.0) -> Tensor:
    """Sentences with pauses between them."""
    parts = []
    for name in names:
        with wave.open(str(FIXTURES / f"{name}.wav")) as file:
            samples = np.frombuffer(file.readframes(file.getnframes()), np.int16)
        parts += [torch.from_numpy(samples / 32768).float(), torch.zeros(int(pause_s * 16_000))]
    return torch.cat(parts)


def told(emissions: list[Emission]) -> Told:
    return [(e.text, e.frame, e.end_of_segment, e.revises) for e in emissions]


def live(emissions: list[Emission]) -> list[Emission]:
    return [e for e in emissions if not e.revises]


def settling(lively: Recognizer) -> Recognizer:
    """Without a language model, as the made-up vocabulary has none."""
    return Recognizer(lively.model, lively.tokenizer, settled=JointConfig(6, 5.0))


def test_live_emissions_are_those_of_greedy_search(lively: Recognizer, bundled: Recognizer):
    for greedy, both, samples in (
        (lively, settling(lively), sound(60_000)),
        (bundled, bundled.settling(8), speech("weather", "suit")),
    ):
        alone = greedy.transcribe(samples)
        assert len(alone) > 10
        assert told(live(both.transcribe(samples))) == told(alone)


def test_each_segment_is_settled_as_joint_search_reads_it(bundled: Recognizer):
    samples = speech("weather", "suit")
    alone, both = bundled.searching(8).transcribe(samples), bundled.settling(8).transcribe(samples)
    assert text_of(both) == text_of(alone) != text_of(live(both))
    ends = [n for n, e in enumerate(both) if e.end_of_segment]
    assert len(ends) >= 2
    for first, last in pairwise([-1, *ends]):
        segment = both[first + 1 : last]
        assert any(e.revises for e in segment) and any(not e.revises for e in segment)
    revisions = [(e.text, e.frame) for e in both if e.revises]
    assert revisions == [(e.text, e.frame) for e in alone if not e.end_of_segment]


@pytest.mark.parametrize(("made_up", "segments"), [(True, 1), (False, 2)])
def test_chunks_and_company_change_nothing(lively: Recognizer, bundled: Recognizer, made_up: bool, segments: int):
    samples = sound(90_000) if made_up else speech("weather", "suit")
    both = settling(lively) if made_up else bundled.settling(4)
    whole = told(both.transcribe(samples))
    assert sum(end for _, _, end, _ in whole) >= segments and any(revises for *_, revises in whole)
    for seed in (1, 2):
        randomness, found, start, state = random.Random(seed), list[Emission](), 0, both.init_state(3)
        size = state_bytes(state)
        while start < len(samples):
            piece = samples[start : start + randomness.randint(1, 9000)]
            start += len(piece)
            company = torch.stack([torch.randn(len(piece)), piece, torch.randn(len(piece))])
            new, state = both.step(company, torch.tensor([len(piece) // 2, len(piece), 0]), state)
            found += new[1]
        rest, state = both.flush(state, torch.tensor([False, True, False]))
        assert told(found + rest[1]) == whole
        assert state_bytes(state) == size, "memory of a stream grew"


def test_a_segment_has_one_end_and_its_revision_before_it(lively: Recognizer):
    both = settling(lively)
    emissions = both.transcribe(sound(130_000))
    assert emissions[-1].end_of_segment
    segment: list[Emission] = []
    for e in emissions:
        if not e.end_of_segment:
            segment.append(e)
            continue
        assert segment, "an end without a segment"
        for kind in (True, False):
            frames = [x.frame for x in segment if x.revises is kind]
            assert frames == sorted(frames)
        segment = []


def test_silence_is_nothing(bundled: Recognizer):
    assert bundled.settling(4).transcribe(torch.zeros(48_000)) == []


def test_phrases_weigh_in_live_text_as_without_settling(lively: Recognizer):
    samples = sound(60_000)
    greedy = Recognizer(lively.model, lively.tokenizer, phrases=PhraseBook(lively.tokenizer, 3.0))
    both = Recognizer(
        lively.model, lively.tokenizer, phrases=PhraseBook(lively.tokenizer, 9.0), settled=JointConfig(6, 5.0)
    )
    found = []
    for recognizer in (greedy, both):
        assert recognizer.phrases is not None
        root = recognizer.phrases.add(["bad cab", "dead"])
        state = recognizer.init_state(1, torch.tensor([root]))
        emissions, state = recognizer.step(samples[None], torch.tensor([len(samples)]), state)
        rest, _ = recognizer.flush(state, torch.tensor([True]))
        found.append(told(live(emissions[0] + rest[0])))
    assert found[0] == found[1] != told(lively.transcribe(samples))


def test_no_settling_without_a_revision():
    def character(text: str, frame: int, revises: bool = False) -> Emission:
        return Emission(text, frame, 1.0, 1.0, text == "", (), revises=revises)

    emissions = [character("a", 1), character("b", 2, True), character("", 3), character("c", 4), character("", 5)]
    assert text_of(emissions) == "b c"
    assert text_of([*emissions, character("d", 6)]) == "b c d", "a segment that is still open"


@pytest.mark.parametrize("width", [1, 4])
def test_memory_of_a_stream_is_what_both_searches_need(bundled: Recognizer, width: int):
    alone = state_bytes(bundled.searching(width).init_state(1)) + state_bytes(bundled.init_state(1))
    assert state_bytes(bundled.settling(width).init_state(1)) <= alone
