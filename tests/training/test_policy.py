"""Training on what the decoder writes by itself, against its definition: expected costs over all texts there can be."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from pydantic import ValidationError

from mocha_model.attention import Memory
from mocha_model.checkpoint import load_checkpoint
from mocha_model.config import tiny
from mocha_model.model import SpeechModel
from mocha_model.search import GreedySearch
from mocha_model.streaming import valid_mask
from mocha_model.tokenizer import Tokenizer
from mocha_training.config import TrainConfig
from mocha_training.manifests import decode_audio
from mocha_training.mistakes import CHARACTER_COST, Texts, costs, increases
from mocha_training.policy import Drawn, advantages, drawn, expected_errors, log_probabilities, policy_losses

FIXTURES = Path(__file__).parents[1] / "fixtures"
TOKENIZER = Tokenizer.from_texts([])  # a space and an apostrophe: two symbols that can be written
SPACE, LETTER = TOKENIZER.space_id, TOKENIZER.encode("'")[0]


def texts(rows: list[list[int]]) -> Texts:
    padded = np.zeros((len(rows), max(map(len, rows))), np.int64)
    for row, ids in zip(padded, rows, strict=True):
        row[: len(ids)] = ids
    return Texts(padded, np.array([len(row) for row in rows]))


def edit_distance(a: list[int], b: list[int]) -> int:
    """Insertions, deletions and replacements, as defined."""
    if not a or not b:
        return len(a) + len(b)
    if a[-1] == b[-1]:
        return edit_distance(a[:-1], b[:-1])
    return 1 + min(edit_distance(a[:-1], b), edit_distance(a, b[:-1]), edit_distance(a[:-1], b[:-1]))


def test_increases_are_those_of_the_edit_distance_to_any_beginning():
    draw = np.random.default_rng(0)
    pairs = [[draw.integers(4, 7, draw.integers(0, 7)).tolist() for _ in range(2)] for _ in range(60)]
    found = increases(texts([a for a, _ in pairs]), texts([b for _, b in pairs]))
    for row, (written, said) in zip(found, pairs, strict=True):
        for count in range(len(written) + 1):
            nearest = min(edit_distance(written[:count], said[:n]) for n in range(len(said) + 1))
            assert row[:count].sum() == nearest
        assert row.sum() == row[: len(written) + 1].sum() == edit_distance(written, said)


def numbers(text: str) -> list[int]:
    return [ord(character) for character in text]


def test_costs_are_where_the_errors_are():
    written = ["the cot sat", "the cat", "", "the cat sat "]
    frames = np.array([[*range(2, 2 + len(text)), *[0] * (12 - len(text))] for text in written])
    said = texts([numbers("the cat sat")] * 4)
    found, rate = costs(texts(list(map(numbers, written))), frames, np.array([20, 14, 5, 20]), 20, said, ord(" "))
    # The "o" is read at 7, the space behind its word at 9; what is missed is known at the end.
    for row, expected in enumerate(
        [{7: CHARACTER_COST, 9: 1}, {13: 1 + 4 * CHARACTER_COST}, {4: 3 + 11 * CHARACTER_COST}]
    ):
        assert {at: cost for at, cost in enumerate(found[row].tolist()) if cost} == pytest.approx(expected)
    assert found[3].sum() == CHARACTER_COST  # a space too many, and no word
    assert rate == 5 / 12


@pytest.fixture(params=["monotonic", "mocha", "matcha"])
def model(request: pytest.FixtureRequest) -> SpeechModel:
    """One that may select at any frame or not, whose energies differ from state to state."""
    torch.manual_seed(3)
    config = tiny(TOKENIZER.vocab_size)
    attention = config.attention.model_copy(update={"mechanism": request.param, "initial_bias": 0.0, "chunk_width": 2})
    made = SpeechModel(config.model_copy(update={"attention": attention})).eval()
    with torch.no_grad():
        for weight in (made.decoder.attention.energies.direction, made.decoder.output.weight):
            weight.mul_(4)
    return made


def all_texts(num_frames: int) -> Drawn:
    """Every text that can be written in so many frames, each at all its places."""
    rows = list(itertools.product((0, SPACE, LETTER), repeat=num_frames))  # 0 where nothing is selected
    tokens, frames = (torch.full((len(rows), num_frames + 1), fill) for fill in (0, -1))
    for row, symbols in enumerate(rows):
        at = [frame for frame, symbol in enumerate(symbols) if symbol]
        tokens[row, : len(at) + 1] = torch.tensor([*(symbols[frame] for frame in at), Tokenizer.eos_id])
        frames[row, : len(at)] = torch.tensor(at, dtype=torch.int64)
    return Drawn(tokens, (frames >= 0).sum(1) + 1, frames)


def memory_of(model: SpeechModel, num_frames: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(1, num_frames, model.encoder.output_size), torch.tensor([num_frames])


def rows(model: SpeechModel, memory: tuple[torch.Tensor, torch.Tensor], count: int) -> Memory:
    values, num_frames = memory[0].expand(count, -1, -1), memory[1].expand(count)
    return model.decoder.attention.prepare(values, valid_mask(num_frames, values.shape[1]))


def test_texts_are_drawn_as_often_as_they_are_likely(model: SpeechModel):
    memory, temperature, draws = memory_of(model, 3), 0.8, 40_000
    everything = all_texts(3)
    likely = log_probabilities(model.decoder, rows(model, memory, 27), everything, temperature).sum(1).exp()
    assert likely.sum().item() == pytest.approx(1, abs=1e-5) and likely.max() < 0.6
    found = drawn(model.decoder, rows(model, memory, draws), temperature)
    keys = [tuple(zip(t, f, strict=True)) for t, f in zip(found.tokens.tolist(), found.frames.tolist(), strict=True)]
    for row in range(27):
        key = tuple(zip(everything.tokens[row].tolist(), everything.frames[row].tolist(), strict=True))
        share = sum(drawn[: len(key)] == key[: len(drawn)] for drawn in keys) / draws
        assert share == pytest.approx(likely[row].item(), abs=0.012)


def cost_of(everything: Drawn, tokens: torch.Tensor, num_frames: int) -> NDArray[np.float32]:
    count = len(everything.tokens)
    written = Texts(everything.tokens[:, :-1].numpy(), (everything.num_tokens - 1).numpy())
    said = Texts(tokens[:, :-1].numpy().repeat(count, 0), np.full(count, tokens.shape[1] - 1))
    frames = everything.frames[:, :-1].numpy()
    return costs(written, frames, np.full(count, num_frames), num_frames, said, SPACE)[0]


def test_the_gradient_is_that_of_the_expected_errors(model: SpeechModel):
    memory, temperature, num_frames = memory_of(model, 4), 0.8, 4
    tokens, num_tokens = torch.tensor([[LETTER, SPACE, LETTER, Tokenizer.eos_id]]), torch.tensor([4])
    everything = all_texts(num_frames)
    wrong = torch.from_numpy(cost_of(everything, tokens, num_frames)).sum(1)
    likely = log_probabilities(model.decoder, rows(model, memory, len(wrong)), everything, temperature).sum(1).exp()
    parameters = [p for p in model.decoder.parameters() if p.numel() > 1]
    exact = torch.autograd.grad((likely * wrong).sum() / 3, parameters, allow_unused=True)

    torch.manual_seed(0)
    objective, rate = expected_errors(
        model, memory, tokens, num_tokens, SPACE, draws=60_000, temperature=temperature, discount=1.0
    )
    sampled = torch.autograd.grad(objective, parameters, allow_unused=True)
    exact_flat, sampled_flat = (torch.cat([g.flatten() for g in gs if g is not None]) for gs in (exact, sampled))
    assert exact_flat.norm() > 0.1
    assert (sampled_flat - exact_flat).norm() < 0.08 * exact_flat.norm()
    assert 0 < rate < 3


def test_a_discount_blames_decisions_for_what_is_near():
    cost = torch.zeros(4, 5)
    cost[0, 3], cost[1, 1] = 1.0, 2.0
    found = advantages(cost, 2, 0.5)
    ahead = torch.tensor([[0.125, 0.25, 0.5, 1, 0], [1, 2, 0, 0, 0]])
    torch.testing.assert_close(found[:2], torch.stack([ahead[0] - ahead[1], ahead[1] - ahead[0]]))
    assert not found[2:].any()


@pytest.mark.parametrize("name", ["weather", "suit"])
def test_cold_draws_are_what_greedy_search_reads(name: str):
    checkpoint = load_checkpoint(None)
    model = checkpoint.model.eval()
    audio = torch.from_numpy(decode_audio((FIXTURES / f"{name}.wav").read_bytes(), name)[None] / np.float32(32_768))
    with torch.no_grad():
        memory = model.encode(*model.features(audio, torch.tensor([audio.shape[1]])))
        search = GreedySearch(model.decoder, model.config.decoder, checkpoint.tokenizer.space_id)
        symbols, _ = search.step(memory[0], model.ctc_log_probs(memory[0]), memory[1], search.init_state(1))
    found = drawn(model.decoder, rows(model, memory, 2), 1e-6)
    read = [(symbol.token, symbol.frame) for symbol in symbols]
    for row in range(2):
        count = int(found.num_tokens[row]) - 1
        at = list(zip(found.tokens[row, :count].tolist(), found.frames[row, :count].tolist(), strict=True))
        assert at == read and count > 10


def test_errors_become_fewer():
    torch.manual_seed(0)
    model = SpeechModel(tiny(TOKENIZER.vocab_size))
    memory, tokens = torch.randn(2, 12, model.encoder.output_size), [[LETTER, SPACE, LETTER, Tokenizer.eos_id]] * 2
    batch = ((memory, torch.tensor([12, 9])), torch.tensor(tokens), torch.tensor([4, 4]))
    config = TrainConfig(attention="path", policy_weight=1.0, policy_draws=16, policy_temperature=1.0)
    optimizer = torch.optim.Adam(model.decoder.parameters(), 1e-2)
    rates = []
    for _ in range(60):
        optimizer.zero_grad()
        parts = policy_losses(model, config, *batch, SPACE)
        (parts["policy"][0] * parts["policy"][1]).backward()
        optimizer.step()
        rates.append(float(parts["drawn_wer"][1]))
    assert sum(rates[-5:]) < 0.5 * sum(rates[:5])


def test_both_numbers_are_on_the_device_of_the_model(monkeypatch: pytest.MonkeyPatch):
    """As `Trainer` stacks them with all others."""
    elsewhere = torch.zeros((), device="meta")
    monkeypatch.setattr("mocha_training.policy.expected_errors", lambda *_: (elsewhere, 0.5))
    config = TrainConfig(attention="path", policy_weight=1.0)
    model, rows = SpeechModel(tiny(TOKENIZER.vocab_size)), torch.zeros(1, 1)
    parts = policy_losses(model, config, (rows, rows), rows, rows, SPACE)
    assert {value.device.type for _, value in parts.values()} == {"meta"}


def test_it_is_of_paths_and_of_characters():
    for wrong in ({"attention": "expected"}, {"attention": "path", "units": "words"}):
        with pytest.raises(ValidationError, match="policy_weight"):
            TrainConfig.model_validate({"policy_weight": 1.0} | wrong)
