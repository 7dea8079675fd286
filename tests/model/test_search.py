"""Online decoding against algorithm 1 of Chiu & Raffel 2018, followed line by line for one utterance."""

from itertools import pairwise

import pytest
import torch
from tests.conftest import lively_recognizer

from mocha_model.config import AttentionConfig, tiny
from mocha_model.model import SpeechModel
from mocha_model.search import GreedySearch, Symbol
from mocha_model.tokenizer import Tokenizer


def algorithm_1(model: SpeechModel, memory: torch.Tensor, max_per_frame: int) -> list[Symbol]:
    """Symbols for memory [T, D] without segments: plain loops over one row."""
    decoder, attention = model.decoder, model.decoder.attention
    state, token, t, last, repeats = decoder.init_state(1), 1, 0, 0, 0
    keys, directions = attention.energies.memory_projection(memory), attention.energies.directions()
    found: list[Symbol] = []
    while True:
        for j in range(t, len(memory)):
            e, _ = attention.both_energies(state.hidden, keys[None, j : j + 1], directions)
            if (p := e.sigmoid().item()) >= 0.5:
                break
        else:
            return found
        v = {
            "monotonic": j,
            "mocha": max(0, j - attention.config.chunk_width + 1),
            "matcha": max(last, j - attention.config.chunk_width + 1),
        }[attention.config.mechanism]
        _, u = attention.both_energies(state.hidden, keys[None, v : j + 1], directions)
        weights = u[0].softmax(0)
        context = weights @ memory[v : j + 1]
        state = decoder.step(torch.tensor([token]), context[None], state)
        logits = decoder.logits(state.hidden, context[None])[0]
        logits[[0, 1, 3]] = -torch.inf
        token, q = int(logits.argmax()), logits.softmax(0).max().item()
        repeats = repeats + 1 if found and found[-1].frame == j else 1
        t, last = j + (repeats >= max_per_frame), j
        chunk = (0.0,) * (attention.chunk_width - len(weights)) + tuple(weights.tolist())
        found.append(Symbol(0, token, j, p, q, chunk, j))
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
    expected: list[Symbol] = []
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
    shown = [s for k, s in enumerate(expected) if s.token != space or (k and expected[k - 1].token != space)]
    got = symbols[: len(shown)]
    assert [(s.frame, s.token) for s in got] == [(s.frame, s.token) for s in shown]
    for name in ("p", "q", "weights"):
        found, wanted = (torch.tensor([getattr(s, name) for s in some]) for some in (got, shown))
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("frames_each", [1, 3, 64])
@pytest.mark.parametrize("voiced", [0, 7], ids=["after the last emission", "after the last voiced frame"])
@torch.inference_mode()
def test_a_segment_ends_when_silence_has_lasted(voiced: int, frames_each: int):
    """One character of attention at frame 0, of the CTC head the last at `voiced`, and blanks (0) ever after."""
    lively = lively_recognizer(tiny(VOCAB))
    model, silence = lively.model, lively.config.decoder.endpoint_frames
    search = GreedySearch(model.decoder, model.config.decoder, lively.tokenizer.space_id)
    memory = torch.randn(1, 2 * silence, model.config.encoder.output_size, generator=torch.Generator().manual_seed(1))
    labels = torch.eye(VOCAB)[torch.tensor([[VOCAB - 1 if t == voiced else 0 for t in range(2 * silence)]])]
    bias, found, state = model.decoder.attention.energies.bias, list[Symbol](), search.init_state(1)
    for start, end in pairwise([0, 1, *range(1 + frames_each, 2 * silence, frames_each), 2 * silence]):
        bias[0] = -100.0 if start else 100.0
        part = slice(start, end)
        symbols, state = search.step(memory[:, part], labels[:, part], torch.tensor([end - start]), state)
        found += symbols
    *characters, ended = found
    assert characters and all(s.frame == 0 and s.token != Tokenizer.eos_id for s in characters)
    assert (ended.token, ended.frame) == (Tokenizer.eos_id, voiced + silence)


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
