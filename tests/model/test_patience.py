"""Patience: what a beam emits so many frames after its own at the latest, and what is dropped for it."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from tests.model.test_beam import sound
from tests.model.test_revised import speech

from mocha_model.beam import BeamConfig
from mocha_model.emissions import Emission, text_of
from mocha_model.joint import JointConfig
from mocha_model.recognizer import Recognizer

Make = Callable[..., BeamConfig | JointConfig]
WRITING = partial(JointConfig, length_bonus=1.2)  # much, so that there is something to wait for


def waits(emissions: list[Emission]) -> list[int]:
    """Frames from each character's own to the one that made it certain."""
    return [e.certain - e.frame for e in emissions if e.certain is not None and not e.end_of_segment]


@pytest.mark.parametrize("kind", [BeamConfig, WRITING])
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
    samples = speech("weather", "suit")
    found = {
        seconds: bundled.searching(4, patience_s=seconds).transcribe(samples) for seconds in (0.08, 0.119, 0.48, None)
    }
    assert max(waits(found[0.08])) == max(waits(found[0.119])) == 2
    assert 2 < max(waits(found[0.48])) <= 12 < max(waits(found[None]))
    assert text_of(found[0.08]) != text_of(found[None])
    assert [(e.text, e.frame) for e in found[0.08]] == [(e.text, e.frame) for e in found[0.119]]
