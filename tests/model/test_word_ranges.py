"""What an LSTM expects of words that begin alike, against the sum over these words."""

import itertools

import pytest
import torch

from mocha_model import word_ranges
from mocha_model.word_lstm import OTHER, Recalled, WordLSTM
from mocha_model.word_ranges import WordRanges

NUM_WORDS = 60  # of the counts
OWN = 41  # of them, which the LSTM has


@pytest.fixture
def lstm() -> WordLSTM:
    torch.manual_seed(0)
    model = WordLSTM(OWN + OTHER + 1, 16, 24).requires_grad_(False)
    model.vectors.weight *= 10
    return model


@pytest.fixture
def numbers() -> torch.Tensor:
    return torch.randperm(NUM_WORDS, generator=torch.Generator().manual_seed(1))[:OWN]


def read(lstm: WordLSTM, rows: int) -> Recalled:
    state = lstm.init_state(rows)
    for n in range(3):
        state = lstm.advance(state, (torch.arange(rows) * 7 + n) % OWN)
    return state


def below(unigrams: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(unigrams.double().cumsum(0), (1, 0))


BOUNDS = torch.tensor([[0, 5, 5, 30, 60], [10, 10, 11, 12, 13], [20, 29, 33, 40, 41], [0, 0, 0, 0, 0]])


@pytest.mark.parametrize("many", [0, 8, 1000])
@pytest.mark.parametrize("most", [10, 1000])
def test_masses_are_sums_over_words(
    lstm: WordLSTM, numbers: torch.Tensor, monkeypatch: pytest.MonkeyPatch, many: int, most: int
):
    monkeypatch.setattr(word_ranges, "MANY", many)
    monkeypatch.setattr(word_ranges, "MOST", most)
    unigrams = torch.rand(NUM_WORDS) / NUM_WORDS
    ranges, state = WordRanges(lstm, numbers, below(unigrams)), read(lstm, len(BOUNDS))
    found, rare = ranges.masses(state, BOUNDS), ranges.rare(BOUNDS)
    summed = numbers[:most]
    for row, bounds in enumerate(BOUNDS.tolist()):
        for child, (first, last) in enumerate(itertools.pairwise(bounds)):
            inside = [n for n, word in enumerate(summed.tolist()) if first <= word < last]
            alone = Recalled(*(x[row].expand(len(inside), -1) for x in vars(state).values()))
            expected = lstm.log_probs(alone, torch.tensor(inside, dtype=torch.int64) + OTHER + 1).exp().sum()
            assert found[row, child].item() == pytest.approx(expected.item(), rel=0.05)
            of_range = unigrams[first:last].sum().item()
            others = of_range - unigrams[summed[inside]].sum().item()
            assert rare[row, child].item() == pytest.approx(others / of_range if of_range else 0.0, abs=1e-5)
    others = 1 - unigrams[summed].sum() / unigrams.sum()
    assert ranges.share_of_rare == pytest.approx(max(1e-6, others.item()), rel=1e-4)


def test_a_row_does_not_mind_the_others(lstm: WordLSTM, numbers: torch.Tensor, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(word_ranges, "MANY", 8)
    unigrams = torch.full((NUM_WORDS,), 1 / NUM_WORDS)
    ranges, state = WordRanges(lstm, numbers, below(unigrams)), read(lstm, len(BOUNDS))
    together = ranges.masses(state, BOUNDS)
    for row in range(len(BOUNDS)):
        alone = Recalled(*(x[row : row + 1] for x in vars(state).values()))
        torch.testing.assert_close(ranges.masses(alone, BOUNDS[row : row + 1])[0], together[row], rtol=1e-6, atol=1e-15)
