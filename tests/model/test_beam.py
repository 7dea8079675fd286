"""Beam search: width 1 is greedy search, wide beams are exhaustive search, chunking and company change nothing."""

import itertools
import random
from dataclasses import dataclass

import pytest
import torch
from tests.conftest import lively_recognizer, sound
from torch import Tensor
from torch.nn.functional import logsigmoid

from mocha_model.beam import BeamConfig, BeamSearch
from mocha_model.config import DecoderConfig
from mocha_model.emissions import Emission
from mocha_model.hypotheses import MAX_UNSTABLE
from mocha_model.joint import JointConfig
from mocha_model.phrases import PhraseBook
from mocha_model.recognizer import Recognizer
from mocha_model.scorers import Fusion
from mocha_model.streaming import map_state, state_bytes
from mocha_model.tokenizer import Tokenizer


def frames_of(emissions: list[Emission]) -> list[tuple[str, int]]:
    return [(e.text, e.frame) for e in emissions]


def test_one_hypothesis_is_greedy_search(lively: Recognizer):
    samples = sound(60_000)
    beam = Recognizer(lively.model, lively.tokenizer, None, BeamConfig(width=1))
    greedy = lively.transcribe(samples)
    assert len(greedy) > 10
    assert frames_of(beam.transcribe(samples)) == frames_of(greedy)


@pytest.mark.parametrize(
    "config",
    [
        *(BeamConfig(6, 5.0), BeamConfig(6, 5.0, patience=3)),
        *(JointConfig(6, 5.0), JointConfig(6, 5.0, patience=3), JointConfig(6, 5.0, patience=8, caution=0.3)),
    ],
)
def test_chunks_and_company_change_nothing_and_nothing_is_retracted(
    lively: Recognizer, config: BeamConfig | JointConfig
):
    samples, wide = sound(60_000), Recognizer(lively.model, lively.tokenizer, None, config)
    whole = wide.transcribe(samples)
    assert len(whole) > 10
    randomness, told, start = random.Random(1), [], 0
    state = wide.init_state(3)
    size = state_bytes(state)
    while start < len(samples):
        piece = samples[start : start + randomness.randint(1, 4000)]
        start += len(piece)
        company = torch.stack([torch.randn(len(piece)), piece, torch.randn(len(piece))])
        lengths = torch.tensor([len(piece) // 2, len(piece), 0])
        found, state = wide.step(company, lengths, state)
        told += found[1]
    rest, state = wide.flush(state, torch.tensor([False, True, False]))
    for a, b in zip(told + rest[1], whole, strict=True):
        assert (a.text, a.frame, a.certain) == (b.text, b.frame, b.certain)
        assert a.p == pytest.approx(b.p, abs=1e-4)
    assert all(e.certain is not None and e.certain >= e.frame for e in whole)
    assert state_bytes(state) == size


@pytest.mark.parametrize("config", [None, BeamConfig(3), JointConfig(3)])
def test_a_fresh_state_shares_no_memory_with_itself(lively: Recognizer, config: BeamConfig | JointConfig | None):
    """Rows are written into states in place: what shared memory would be overwritten."""
    phrases = PhraseBook(lively.tokenizer)
    recognizer = Recognizer(lively.model, lively.tokenizer, None, config, phrases=phrases)
    places: list[int] = []
    map_state(lambda x: places.append(x.data_ptr()) if x.numel() else None, recognizer.init_state(2))
    assert len(places) > 10 and len(set(places)) == len(places)


def exhaustive(recognizer: Recognizer, memory: Tensor, symbols: list[int], weight: float) -> tuple[float, list[int]]:
    """Best score and symbols over every sequence that the online process can give, by plain recursion."""
    decoder, attention = recognizer.model.decoder, recognizer.model.decoder.attention
    keys = attention.energies.memory_projection(memory)
    best: tuple[float, list[int]] = (-float("inf"), [])

    def follow(state, token: int, t: int, repeats: int, score: float, path: list[int]) -> None:  # type: ignore[no-untyped-def]
        nonlocal best
        for j in range(t, len(memory)):
            e, u = attention.both_energies(state.hidden, keys[None], attention.energies.directions())
            cut = j == t and repeats == 1  # one emission per frame keeps the sequences few
            if cut or e[0, j] < 0:
                score += 0.0 if cut else weight * float(logsigmoid(-e[0, j]))
                continue
            score += weight * float(logsigmoid(e[0, j]))
            first = max(0, j - attention.chunk_width + 1)
            context = u[0, first : j + 1].softmax(0) @ memory[first : j + 1]
            after = decoder.step(torch.tensor([token]), context[None], state)
            logits = decoder.logits(after.hidden, context[None])[0]
            logits[[Tokenizer.blank_id, Tokenizer.sos_id, Tokenizer.unk_id]] = -torch.inf
            logits[Tokenizer.eos_id] = -torch.inf
            log_probs = logits.log_softmax(0)
            for symbol in symbols:
                again = repeats + 1 if j == t and path else 1
                follow(after, symbol, j, again, score + float(log_probs[symbol]), [*path, symbol])
            return
        if score > best[0]:
            best = (score, path)

    follow(decoder.init_state(1), Tokenizer.sos_id, 0, 0, 0.0, [])
    return best


@dataclass(frozen=True)
class Only:
    """A scorer that allows some symbols."""

    allowed: list[int]
    vocab_size: int

    def init_state(self, batch_size: int, device: torch.device) -> Tensor:
        return torch.zeros(batch_size, device=device)

    def scores(self, state: Tensor) -> Tensor:
        row = torch.full((self.vocab_size,), -torch.inf)
        row[self.allowed] = 0
        return row.expand(len(state), -1)

    def advance(self, state: Tensor, token: Tensor) -> Tensor:
        return state

    def restart(self, state: Tensor) -> Tensor:
        return state


@pytest.mark.parametrize("weight", [0.0, 1.0])
@torch.inference_mode()
def test_a_wide_beam_finds_the_best_sequence(lively: Recognizer, weight: float):
    model = lively.model
    memory, _ = model.encode(*model.features(sound(7_000)[None] * 3, torch.tensor([7_000])))
    allowed = lively.tokenizer.encode("xf")
    with torch.no_grad():
        eos = float(model.decoder.output.bias[Tokenizer.eos_id])
        model.decoder.output.bias[Tokenizer.eos_id] = -1e9
    try:
        score, best = exhaustive(lively, memory[0], allowed, weight)
        only = Only(allowed, lively.tokenizer.vocab_size)
        config = BeamConfig(width=3000, threshold=1e9, selection_weight=weight)
        limits = DecoderConfig(max_emissions_per_frame=1, endpoint_frames=1000)
        search = BeamSearch(model.decoder, limits, 4, config, Fusion(((1.0, only),)))
        lengths = torch.tensor([memory.shape[1]])
        labels = model.ctc(memory)
        told, state = search.step(memory, labels, lengths, search.init_state(1))
        kept = state.hypotheses
        k = int(kept.score[0].argmax())
        found = [s.token for s in told] + kept.tokens[0, k, : int(kept.length[0, k])].tolist()
    finally:
        with torch.no_grad():
            model.decoder.output.bias[Tokenizer.eos_id] = eos
    assert len(best) >= 3
    assert found == best
    assert float(kept.score[0, k]) == pytest.approx(score, abs=1e-3)


def test_fusion_steers_the_search(lively: Recognizer):
    samples = sound(60_000)
    only = Only(lively.tokenizer.encode("qz"), lively.tokenizer.vocab_size)
    steered = Recognizer(lively.model, lively.tokenizer, None, BeamConfig(4, 100.0), Fusion(((1.0, only),)))
    text = "".join(e.text for e in steered.transcribe(samples))
    assert set(text) <= set("qz") and len(text) > 3
    assert all(len(list(group)) < 200 for _, group in itertools.groupby(text))


@dataclass(frozen=True)
class Counting:
    """A scorer that leaves open what the first symbols are, and says what each after them is."""

    num_open: int
    vocab_size: int

    def init_state(self, batch_size: int, device: torch.device) -> Tensor:
        return torch.zeros(batch_size, dtype=torch.int64, device=device)

    def symbol(self, place: int) -> int:
        return 6 + place % 7

    def scores(self, state: Tensor) -> Tensor:
        scores = torch.full((len(state), self.vocab_size), -torch.inf)
        for row, place in enumerate(state.tolist()):
            scores[row, [4, 5] if place < self.num_open else [self.symbol(place)]] = 0
        return scores

    def advance(self, state: Tensor, token: Tensor) -> Tensor:
        return state + 1

    def restart(self, state: Tensor) -> Tensor:
        return torch.zeros_like(state)


@pytest.mark.parametrize("num_open", [1, 4])
@torch.inference_mode()
def test_no_symbol_is_lost_where_hypotheses_agree_late(num_open: int):
    """Whenever the audio ends: what is told then, and what was told before, is all that was written."""
    recognizer = lively_recognizer()
    decoder, vocab = recognizer.model.decoder, recognizer.tokenizer.vocab_size
    decoder.attention.energies.bias[0] = 100.0  # it always fires
    limits, counting = DecoderConfig(max_emissions_per_frame=3), Counting(num_open, vocab)
    search = BeamSearch(decoder, limits, -1, BeamConfig(2**num_open, 1e9), Fusion(((1.0, counting),)))
    frames = MAX_UNSTABLE // 3 + 8
    memory = torch.randn(1, frames, decoder.attention.energies.memory_size)
    state, told = search.init_state(1), list[int]()
    for t in range(frames):
        found, state = search.step(memory[:, [t]], torch.zeros(1, 1, vocab), torch.tensor([1]), state)
        told += [s.token for s in found]
        rest, _ = search.flush(torch.tensor([True]), state)
        whole = told + [s.token for s in rest]
        count = 3 * (t + 1) + limits.max_emissions_at_end
        assert set(whole[:num_open]) <= {4, 5}
        assert whole[num_open:] == [*map(counting.symbol, range(num_open, count)), Tokenizer.eos_id]
