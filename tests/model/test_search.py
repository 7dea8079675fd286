"""Online decoding against algorithm 1 of Chiu & Raffel 2018, followed line by line for one utterance."""

import pytest
import torch
from tests.conftest import lively_recognizer

from mocha_model.config import AttentionConfig, tiny
from mocha_model.model import SpeechModel


def algorithm_1(model: SpeechModel, memory: torch.Tensor, max_per_frame: int) -> list[tuple[int, int]]:
    """(frame, token) pairs for memory [T, D] without segments: plain loops over one row."""
    decoder, attention = model.decoder, model.decoder.attention
    state, token, t, last, repeats = decoder.init_state(1), 1, 0, 0, 0
    keys, directions, found = attention.energies.memory_projection(memory), attention.energies.directions(), []
    while True:
        for j in range(t, len(memory)):
            e, _ = attention.both_energies(state.hidden, keys[None, j : j + 1], directions)
            if e.sigmoid().item() >= 0.5:
                break
        else:
            return found
        v = {
            "monotonic": j,
            "mocha": max(0, j - attention.config.chunk_width + 1),
            "matcha": max(last, j - attention.config.chunk_width + 1),
        }[attention.config.mechanism]
        _, u = attention.both_energies(state.hidden, keys[None, v : j + 1], directions)
        context = u[0].softmax(0) @ memory[v : j + 1]
        state = decoder.step(torch.tensor([token]), context[None], state)
        logits = decoder.logits(state.hidden, context[None])[0]
        logits[[0, 1, 3]] = -torch.inf
        token = int(logits.argmax())
        repeats = repeats + 1 if found and found[-1][0] == j else 1
        t, last = j + (repeats >= max_per_frame), j
        found.append((j, token))
        if token == 2:
            return found


VOCAB = 31  # of `lively_recognizer`
MECHANISMS = {
    "mocha": AttentionConfig(size=12),
    "mocha, eq. 17": AttentionConfig(size=12, energy="dot", chunk_width=3),
    "monotonic": AttentionConfig(size=12, mechanism="monotonic"),
    "monotonic, eq. 17": AttentionConfig(size=12, mechanism="monotonic", energy="dot"),
    "matcha": AttentionConfig(size=12, mechanism="matcha", chunk_width=6),
}


@pytest.mark.parametrize("name", MECHANISMS)
@torch.inference_mode()
def test_online_search_follows_algorithm_1(name: str):
    lively = lively_recognizer(tiny(VOCAB).model_copy(update={"attention": MECHANISMS[name]}))
    samples = torch.randn(1, 60_000, generator=torch.Generator().manual_seed(3)) * 0.1
    samples = samples * (torch.arange(60_000) / 5000).sin().abs()
    model = lively.model
    memory, _ = model.encode(*model.features(samples, torch.tensor([60_000])))
    expected: list[tuple[int, int]] = []
    while len(expected) <= 10:  # untrained energies: raise r until they fire often
        model.decoder.attention.energies.bias[0] += 0.5
        expected = algorithm_1(model, memory[0], model.config.decoder.max_emissions_per_frame)
    symbols, _ = lively._search.step(
        memory,
        torch.eye(VOCAB)[torch.full((1, memory.shape[1]), VOCAB - 1)],  # a character at every frame: no segment ends
        torch.tensor([memory.shape[1]]),
        lively._search.init_state(1),
    )
    space = lively.tokenizer.encode(" ")[0]
    shown = [(j, y) for k, (j, y) in enumerate(expected) if y != space or (k and expected[k - 1][1] != space)]
    got = [(s.frame, s.token) for s in symbols]
    assert got[: len(shown)] == shown


@torch.inference_mode()
def test_frames_where_nothing_fires_cost_no_decoder_step():
    lively = lively_recognizer(tiny(VOCAB))
    steps: list[int] = []
    lively.model.decoder.cell.register_forward_hook(lambda *_: steps.append(1))
    samples = torch.randn(60_000, generator=torch.Generator().manual_seed(3)) * 0.1
    bias = lively.model.decoder.attention.energies.bias
    bias[0] = -100.0
    assert lively.transcribe(samples) == [] and not steps
    bias[0] = 100.0
    assert lively.transcribe(samples) and steps
