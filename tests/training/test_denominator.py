"""What all texts together score, against its definition: a sum over texts, each by CTC and by its trigrams."""

import itertools
import math

import pytest
import torch
from pydantic import ValidationError
from torch.nn import functional

from mocha_model.tokenizer import Tokenizer
from mocha_training import losses
from mocha_training.config import TrainConfig
from mocha_training.denominator import (
    FIRST,
    character_trigrams,
    denominator,
    log_total,
    log_total_of_pairs,
    phone_bigrams,
)

SPACE = 0


def by_ctc(log_probs: torch.Tensor, text: tuple[int, ...]) -> float:
    """Probability of a text, as symbols of S, in log_probs [T, V]."""
    if not text:
        return float(log_probs[:, 0].sum().exp())
    targets = torch.tensor([text]) + FIRST
    nll = functional.ctc_loss(
        log_probs[:, None], targets, torch.tensor([len(log_probs)]), torch.tensor([len(text)]), reduction="none"
    )
    return float((-nll[0]).exp())  # of an impossible one 0


def by_trigrams(trigrams: torch.Tensor, text: tuple[int, ...]) -> float:
    symbols = [SPACE, SPACE, *text, SPACE]
    return math.prod(float(trigrams[run]) for run in zip(symbols, symbols[1:], symbols[2:], strict=False))


def some_trigrams(size: int) -> torch.Tensor:
    trigrams = torch.rand(size, size, size)
    return trigrams / trigrams.sum(2, keepdim=True)


def test_it_is_the_sum_over_all_texts():
    torch.manual_seed(0)
    size, trigrams = 3, some_trigrams(3)
    log_probs = (2 * torch.randn(2, 5, FIRST + size)).log_softmax(2)
    found = log_total(log_probs, torch.tensor([5, 3]), trigrams, SPACE)
    for row, frames in enumerate((5, 3)):
        texts = [t for n in range(frames + 1) for t in itertools.product(range(size), repeat=n)]
        total = sum(by_ctc(log_probs[row, :frames], text) * by_trigrams(trigrams, text) for text in texts)
        assert found[row].item() == pytest.approx(math.log(total), rel=1e-5)


def test_its_gradient_is_that_of_small_steps():
    torch.manual_seed(1)
    trigrams, num_frames = some_trigrams(2).double(), torch.tensor([4])
    scores = torch.randn(1, 4, FIRST + 2)
    scores.requires_grad_()
    log_total(scores.log_softmax(2), num_frames, trigrams.float(), SPACE).sum().backward()
    for at in ((0, 0, 0), (0, 1, FIRST), (0, 3, FIRST + 1)):
        step = torch.zeros_like(scores)
        step[at] = 1e-2
        with torch.no_grad():
            more, less = (
                log_total((scores + s).log_softmax(2), num_frames, trigrams.float(), SPACE) for s in (step, -step)
            )
        assert scores.grad is not None
        assert scores.grad[at].item() == pytest.approx(((more - less) / 2e-2).item(), abs=1e-3)


def test_long_and_certain_recordings_neither_vanish_nor_overflow():
    log_probs = torch.full((1, 2000, FIRST + 3), -30.0)
    log_probs[:, ::2, 0] = log_probs[:, 1::2, FIRST + 1] = 0.0
    log_probs = log_probs.log_softmax(2).requires_grad_()
    total = log_total(log_probs, torch.tensor([2000]), some_trigrams(3), SPACE)
    total.sum().backward()
    assert torch.isfinite(total).all() and log_probs.grad is not None and torch.isfinite(log_probs.grad).all()


def test_trigrams_follow_the_counts_and_leave_room_for_what_was_not_seen():
    tokenizer = Tokenizer.from_texts(["ab ac"])
    a, b, c, space = (tokenizer.encode(s)[0] - FIRST for s in "abc ")
    trigrams = character_trigrams(["ab", "ab", "ac"], tokenizer)
    size = tokenizer.vocab_size - FIRST
    assert trigrams.shape == (size,) * 3 and torch.allclose(trigrams.sum(2), torch.ones(size, size))
    # Witten and Bell by hand: of 9 characters 3 are a, 2 b, 1 c, 3 the space; after a come b twice and c once.
    alone = {s: (n + 4 / size) / (9 + 4) for s, n in ((a, 3), (b, 2), (c, 1), (space, 3))}
    after_a = {s: (n + 2 * alone[s]) / (3 + 2) for s, n in ((a, 0), (b, 2), (c, 1), (space, 0))}
    for s, n in ((a, 0), (b, 2), (c, 1), (space, 0)):
        assert trigrams[space, a, s].item() == pytest.approx((n + 2 * after_a[s]) / (3 + 2))
        assert trigrams[c, a, s].item() == pytest.approx(after_a[s]), "c a was never seen"
    assert torch.equal(character_trigrams(["a9b", "ab", "ac"], tokenizer), trigrams), "9 is no symbol of it"


def test_utterances_with_too_few_frames_count_as_zero_in_both_halves():
    torch.manual_seed(2)
    trigrams = some_trigrams(3)
    log_probs = torch.randn(2, 4, FIRST + 3).log_softmax(2)
    tokens = torch.tensor([[4, 5, 2, 0], [4, 4, 4, 2]])  # the second needs five frames
    num_tokens, num_frames = torch.tensor([3, 4]), torch.tensor([4, 4])
    assert math.isinf(functional.ctc_loss(log_probs[1], tokens[1, :3], num_frames[:1], num_tokens[1:] - 1))
    both = denominator(log_probs, num_frames, tokens, num_tokens, trigrams, FIRST)
    first = log_total(log_probs[:1], num_frames[:1], trigrams, SPACE)
    assert both.item() == pytest.approx(first.item() / 5)


def test_a_text_that_the_symbols_cannot_spell_counts_as_zero():
    torch.manual_seed(2)
    trigrams, num_frames = some_trigrams(3), torch.tensor([5, 5])
    log_probs = torch.randn(2, 5, FIRST + 3).log_softmax(2)
    tokens, num_tokens = torch.tensor([[4, 5, 2], [4, Tokenizer.unk_id, 2]]), torch.tensor([3, 3])
    both = denominator(log_probs, num_frames, tokens, num_tokens, trigrams, FIRST)
    first = log_total(log_probs[:1], num_frames[:1], trigrams, SPACE)
    assert both.item() == pytest.approx(first.item() / 4)


def test_a_transcript_is_never_likelier_than_all_texts():
    torch.manual_seed(3)
    trigrams = some_trigrams(3)
    log_probs = (4 * torch.randn(1, 6, FIRST + 3)).log_softmax(2)
    tokens, num_tokens, num_frames = torch.tensor([[5, 6, 4, 2]]), torch.tensor([4]), torch.tensor([6])
    score = losses.ctc(log_probs, num_frames, tokens, num_tokens)
    score += denominator(log_probs, num_frames, tokens, num_tokens, trigrams, FIRST)
    assert 3 * score.item() > math.log(by_trigrams(trigrams, (1, 2, 0)))


def test_a_large_alphabet_has_no_trigrams():
    texts = ["".join(map(chr, range(0x4E00, 0x4E00 + 300)))]
    with pytest.raises(ValueError, match="up to 200 characters, not 302"):
        character_trigrams(texts, Tokenizer.from_texts(texts))


def test_units_of_words_have_no_denominator():
    with pytest.raises(ValidationError, match="denominator_weight is of characters"):
        TrainConfig(denominator_weight=0.5, units="words")


def test_of_pairs_of_phones_it_is_the_sum_over_all_sequences():
    torch.manual_seed(3)
    size = 2
    after, first, last = phone_bigrams([[1, 2, 2], [2, 1]], size)
    ends = torch.cat([after, last[:, None]], 1).sum(1)
    torch.testing.assert_close(ends, torch.ones(size))
    assert after[0, 1] > after[0, 0] and last[0] > after[0, 0]  # 1 is followed by 2, and ends a text
    log_probs = (2 * torch.randn(2, 4, 1 + size)).log_softmax(2)
    found = log_total_of_pairs(log_probs, torch.tensor([4, 3]), (after, first, last))
    for row, frames in enumerate((4, 3)):
        total = 0.0
        for count in range(1, frames + 1):
            for labels in itertools.product(range(size), repeat=count):
                targets = torch.tensor([labels]) + 1
                lengths = torch.tensor([frames]), torch.tensor([count])
                nll = functional.ctc_loss(log_probs[row, :frames, None], targets, *lengths, reduction="none")
                score = float(first[labels[0]]) * math.prod(float(after[a, b]) for a, b in itertools.pairwise(labels))
                total += float((-nll[0]).exp()) * score * float(last[labels[-1]])
        assert found[row].item() == pytest.approx(math.log(total), rel=1e-5)
