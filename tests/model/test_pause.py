"""How long a pause ends a segment is each stream's own, whatever company it has and however its audio is cut."""

import random

import pytest
import torch
from tests.conftest import sound

from mocha_model.beam import BeamConfig
from mocha_model.emissions import Emission
from mocha_model.joint import JointConfig
from mocha_model.recognizer import Recognizer

PAUSES = [2, 4, 20, 500]  # frames


def searches(lively: Recognizer) -> dict[str, Recognizer]:
    def alike(**search: object) -> Recognizer:
        return Recognizer(lively.model, lively.tokenizer, **search)  # type: ignore[arg-type]

    return {
        "greedy": lively,
        "beam": alike(beam=BeamConfig(4)),
        "joint": alike(beam=JointConfig(4)),
        "settled": alike(settled=JointConfig(4)),
    }


def speech(recognizer: Recognizer) -> torch.Tensor:
    quiet = torch.zeros(recognizer.frame_samples * 30)
    return torch.cat([sound(20_000), quiet, sound(20_000), quiet, sound(8_000)])


def ends(emissions: list[Emission]) -> list[int]:
    return [emission.frame for emission in emissions if emission.end_of_segment]


@pytest.mark.parametrize("name", ["greedy", "beam", "joint", "settled"])
def test_each_stream_has_its_own(lively: Recognizer, name: str):
    recognizer, rng = searches(lively)[name], random.Random(4)
    samples, alone = speech(recognizer), []
    for pause in PAUSES:
        state = recognizer.init_state(1, pause=torch.tensor([pause]))
        first, state = recognizer.step(samples[None], torch.tensor([len(samples)]), state)
        rest, _ = recognizer.flush(state, torch.tensor([True]))
        alone.append(first[0] + rest[0])
    state, found, start = recognizer.init_state(len(PAUSES), pause=torch.tensor(PAUSES)), [[] for _ in PAUSES], 0
    while start < len(samples):
        piece = samples[start : start + rng.randint(1, 9_000)]
        new, state = recognizer.step(piece.repeat(4, 1), torch.full((4,), len(piece)), state)
        found, start = [a + b for a, b in zip(found, new, strict=True)], start + len(piece)
    rest, state = recognizer.flush(state, torch.ones(4, dtype=torch.bool))
    found = [a + b for a, b in zip(found, rest, strict=True)]
    read = [[(e.text, e.frame, e.end_of_segment, e.revises) for e in emissions] for emissions in found]
    assert read == [[(e.text, e.frame, e.end_of_segment, e.revises) for e in emissions] for emissions in alone]
    first_ends = [ends(emissions)[0] for emissions in found]
    assert first_ends == sorted(first_ends) and first_ends[0] < first_ends[1] < first_ends[-1]


@pytest.mark.parametrize("name", ["greedy", "beam", "joint", "settled"])
def test_what_follows_a_flush_has_the_same(lively: Recognizer, name: str):
    recognizer, samples = searches(lively)[name], speech(lively)
    state, found = recognizer.init_state(1, pause=torch.tensor([2])), []
    for _ in range(2):
        first, state = recognizer.step(samples[None], torch.tensor([len(samples)]), state)
        rest, state = recognizer.flush(state, torch.tensor([True]))
        found.append(ends(first[0] + rest[0]))
    assert found[0] == found[1] and found[0][0] < recognizer.pause_frames
