"""Patience: what a beam emits so many frames after its own at the latest, and what is dropped for it."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from tests.model.test_beam import sound
from tests.model.test_revised import speech

from mocha_model.beam import BeamConfig
from mocha_model.emissions import Emission, text_of
from mocha_model.joint import JointConfig, JointSearch
from mocha_model.recognizer import Recognizer, joint_search, language_for
from mocha_model.search import Symbol
from mocha_model.wide import WideState

Make = Callable[..., BeamConfig | JointConfig]
WRITING = partial(JointConfig, length_bonus=1.2)  # much, so that there is something to wait for


def waits(emissions: list[Emission]) -> list[int]:
    """Frames from each character's own to the one that made it certain."""
    return [e.certain - e.frame for e in emissions if e.certain is not None and not e.end_of_segment]


@pytest.mark.parametrize("kind", [BeamConfig, WRITING, partial(WRITING, caution=0.3)])
def test_no_character_waits_longer(lively: Recognizer, kind: Make):
    samples = sound(60_000)
    longest = []
    for patience in (2, 7, 10_000):
        config = kind(width=6, threshold=5.0, patience=patience)
        found = waits(Recognizer(lively.model, lively.tokenizer, None, config).transcribe(samples))
        assert len(found) > 10
        longest.append(max(found))
        assert longest[-1] <= patience
    assert longest == sorted(set(longest)), "more patience, longer waits"


@pytest.mark.parametrize("kind", [BeamConfig, WRITING])
def test_more_patience_than_there_is_sound_is_waiting_for_all(lively: Recognizer, kind: Make):
    samples, found = sound(60_000), []
    for changes in ({"patience": 10_000}, {}):
        config = kind(width=6, threshold=5.0, **changes)
        emissions = Recognizer(lively.model, lively.tokenizer, None, config).transcribe(samples)
        found.append([(e.text, e.frame, e.certain) for e in emissions])
    assert len(found[0]) > 10 and found[0] == found[1]


@torch.inference_mode()
@pytest.mark.parametrize("kind", [BeamConfig, WRITING])
def test_no_hypothesis_holds_anything_back_for_longer(lively: Recognizer, kind: Make):
    """So whichever is the best one later, what it adds is not late."""
    patience = 3
    recognizer = Recognizer(lively.model, lively.tokenizer, None, kind(width=6, threshold=5.0, patience=patience))
    samples, state, told = sound(60_000), recognizer.init_state(1), ""
    disputed = 0
    for start in range(0, len(samples), recognizer.frame_samples):
        piece = samples[None, start : start + recognizer.frame_samples]
        emissions, state = recognizer.step(piece, torch.tensor([piece.shape[1]]), state)
        told += "".join(e.text for e in emissions[0])
        h, now = state.search.hypotheses, int(state.search.num_frames[0]) - 1
        alive = h.score[0] > -torch.inf
        for k in alive.nonzero()[:, 0].tolist():
            assert (h.frames[0, k, : int(h.length[0, k])] > now - patience).all()
        disputed += int(alive.sum()) > 1 and int(h.length[0, alive].max()) > 0
    assert len(told) > 10 and disputed > 5


def test_patience_is_given_in_seconds_and_counted_in_frames(bundled: Recognizer):
    """Of which those that the encoder looks ahead are a part."""
    samples, language = speech("weather", "suit"), language_for(bundled.tokenizer)
    frame_s = bundled.frame_samples / bundled.sample_rate
    ahead = bundled.config.encoder.look_ahead_frames
    patient = {
        frames: bundled.searching(4, language, patience_s=(ahead + frames) * frame_s) for frames in (2.01, 2.99, 12.01)
    }
    assert patient[2.01].patience_samples == (ahead + 2) * bundled.frame_samples
    found = {frames: recognizer.transcribe(samples) for frames, recognizer in patient.items()}
    assert max(waits(bundled.searching(4, language, patience_s=0).transcribe(samples))) == 1
    unhurried = bundled.searching(4, language).transcribe(samples)
    assert max(waits(found[2.01])) == max(waits(found[2.99])) == 2
    assert 2 < max(waits(found[12.01])) <= 12 < max(waits(unhurried))
    assert text_of(found[2.01]) != text_of(unhurried)
    assert [(e.text, e.frame) for e in found[2.01]] == [(e.text, e.frame) for e in found[2.99]]


class Judged(JointSearch):
    """A search each of whose decisions is judged by the definition; `early` counts those that took less caution."""

    early = 0

    def _tell_stable(
        self, state: WideState, symbols: list[Symbol], real: torch.Tensor, values: torch.Tensor, room: int = 0
    ) -> WideState:
        after = super()._tell_stable(state, symbols, real, values, room)
        now = int(state.num_frames[0]) - 1
        told, agreed = by_definition(state.hypotheses, now, self.joint.patience, self.joint.caution)
        self.early += told > agreed
        best = int(state.hypotheses.score[0].argmax())
        assert int(state.hypotheses.length[0, best] - after.hypotheses.length[0, best]) == told
        return after


def by_definition(h: Any, now: int, patience: int, caution: float) -> tuple[int, int]:
    """How many symbols of its one row are told at frame `now`, and how many would be if none might contradict them."""
    prefixes = []
    for k in range(h.score.shape[1]):
        length, score = int(h.length[0, k]), float(h.score[0, k])
        if score > -math.inf:
            prefixes.append((score, h.tokens[0, k, :length].tolist(), h.frames[0, k, :length].tolist()))
    _, lead, frames = max(prefixes)
    due = [sum(frame <= now - patience for frame in own) for _, _, own in prefixes]
    must = sum(frame <= now - patience for frame in frames)
    left = [p for p, own in zip(prefixes, due, strict=True) if own == must and p[1][:must] == lead[:must]]
    total = sum(math.exp(score) for score, *_ in left)
    likely = 0
    while likely < len(lead):
        without = sum(math.exp(score) for score, own, _ in left if own[: likely + 1] != lead[: likely + 1])
        if without / total >= math.exp(-caution * (frames[likely] + patience - now)):
            break
        likely += 1

    def shared(count: int) -> int:
        """How much is common to all prefixes that begin with the first `count` symbols."""
        able = [own for _, own, _ in left if own[:count] == lead[:count]]
        return max(n for n in range(len(lead) + 1) if all(own[:n] == lead[:n] for own in able))

    return shared(likely), shared(must)


@pytest.mark.parametrize("caution", [0.1, 0.4, 1.0])
@torch.inference_mode()
def test_what_is_likely_enough_is_told_and_what_contradicts_it_dropped(bundled: Recognizer, caution: float):
    found, fusion = joint_search(bundled.config, bundled.tokenizer, 12) or pytest.fail("no language model")
    model, config = bundled.model, replace(found, patience=15, caution=caution)
    search = Judged(model.decoder, model.config.decoder, bundled.tokenizer.space_id, config, fusion)
    samples = speech("weather", "suit")[None]
    features = model.features(samples, torch.tensor([samples.shape[1]]))
    memory, below, num_frames, _ = model.encoder.step_both(*features, model.encoder.init_state(1))
    phones = model.phone_log_probs(below)
    symbols, _ = search.step(memory, model.ctc(memory), num_frames, search.init_state(1), phones)
    assert len(symbols) > 40 and search.early > 10


def test_less_caution_is_sooner(bundled: Recognizer):
    samples, language, spent = speech("weather", "suit"), language_for(bundled.tokenizer), []
    for caution in (math.inf, 0.6, 0.3, 0.1):
        found, fusion = joint_search(bundled.config, bundled.tokenizer, 12, language) or pytest.fail(
            "no language model"
        )
        config = replace(found, patience=20, caution=caution)
        late = waits(Recognizer(bundled.model, bundled.tokenizer, None, config, fusion).transcribe(samples))
        assert max(late) <= 20
        spent.append(np.mean(late))
    assert all(before > after + 1 for before, after in pairwise(spent)), spent
