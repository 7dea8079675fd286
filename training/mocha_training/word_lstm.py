"""Training of `mocha_model.word_lstm` from sentences, beside the counts of `language`. Knows nothing of search."""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mocha_model.word_lstm import END, OTHER, WordLSTM

SENTENCES = 128  # of a batch; those of SORTED batches are sorted by length
SORTED = 40
OUTSIDE = -1  # in place of a word, beyond the end of a sentence


@dataclass(frozen=True)
class WordLSTMConfig:
    """Sizes, and how it is trained.

    Attributes:
        num_words: the most frequent ones, which have vectors of `vector_size`.
        epochs: passes over the sentences.
        learning_rate: the highest; it rises for `warmup` batches, or a tenth of all if that is less, and falls along a
            cosine to nothing.
        samples: other words that each batch's words are told from, instead of all (Jean et al. 2015).
        normalisation: weight of the squared logarithm of what scores sum to (Devlin et al. 2014, eq. 5).

    """

    num_words: int = 20_000
    vector_size: int = 192
    hidden_size: int = 384
    dropout: float = 0.3
    epochs: int = 5
    learning_rate: float = 3e-3
    warmup: int = 200
    samples: int = 1500
    normalisation: float = 0.1
    seed: int = 0
    bf16: bool = True


def train_word_lstm(
    sentences: list[str],
    config: WordLSTMConfig,
    progress: Callable[[float], None] = lambda done: None,
) -> tuple[WordLSTM, list[str]]:
    """A model of `sentences`, and its words from number 2 on; `progress` is told what share is done."""
    counts = Counter(word for sentence in sentences for word in sentence.split())
    words = [word for word, _ in counts.most_common(config.num_words - 2)]
    number = {word: n for n, word in enumerate(words, OTHER + 1)}
    numbered = [
        torch.tensor([END, *(number.get(word, OTHER) for word in sentence.split()), END]) for sentence in sentences
    ]
    torch.manual_seed(config.seed)
    model = WordLSTM(len(words) + 2, config.vector_size, config.hidden_size, config.dropout)
    frequent = torch.cat([s[1:] for s in numbered]).bincount(minlength=len(words) + 2).clamp(min=1).double()
    with torch.no_grad():
        model.bias.copy_((frequent / frequent.sum()).log())
    drawn = (frequent**0.75 / (frequent**0.75).sum()).float()
    chance = inclusion(drawn, config.samples).log()
    optimizer = torch.optim.Adam(model.parameters(), config.learning_rate, fused=True)
    steps = config.epochs * math.ceil(len(numbered) / SENTENCES)
    warmup = min(config.warmup, steps // 10 + 1)
    rates = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda n: min(1, (n + 1) / warmup) * 0.5 * (1 + math.cos(math.pi * min(1, n / steps)))
    )
    for step, batch in enumerate(_batches(numbered, config.epochs, np.random.default_rng(config.seed)), 1):
        with torch.autocast("cpu", torch.bfloat16, enabled=config.bf16):
            loss = _loss(model, pad_sequence(batch, True, OUTSIDE), drawn, chance, config)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rates.step()
        progress(step / steps)
    return model.eval().requires_grad_(False), words


def _batches(numbered: list[Tensor], epochs: int, rng: np.random.Generator) -> Iterator[list[Tensor]]:
    """Every sentence once in each epoch, with others of about its length."""
    for _ in range(epochs):
        order = rng.permutation(len(numbered)).tolist()
        batches: list[list[int]] = []
        for start in range(0, len(order), SENTENCES * SORTED):
            alike = sorted(order[start : start + SENTENCES * SORTED], key=lambda n: len(numbered[n]))
            batches += [alike[n : n + SENTENCES] for n in range(0, len(alike), SENTENCES)]
        for at in rng.permutation(len(batches)):
            yield [numbered[n] for n in batches[at]]


def inclusion(drawn: Tensor, count: int) -> Tensor:
    """How likely each of N words is among `count` that are drawn by `drawn` [N] without putting any back; [N] float32.

    As if words arrived by Poisson processes with these rates, until so many different ones are there (Rosen 1972).
    """
    if count >= len(drawn):
        return torch.ones_like(drawn)
    rates, low, high = drawn.double(), 0.0, 1.0
    while -torch.expm1(-high * rates).sum() < count:
        high *= 2
    for _ in range(60):
        time = (low + high) / 2
        low, high = (time, high) if -torch.expm1(-time * rates).sum() < count else (low, time)
    return -torch.expm1(-high * rates).float()


def _loss(model: WordLSTM, words: Tensor, drawn: Tensor, chance: Tensor, config: WordLSTMConfig) -> Tensor:
    """Mean over the words of [R, T] int64: cross-entropy among some others, and what scores lack of being normalised.

    The others are drawn by `drawn` [N], without putting any back, and each stands for as many words as it takes draws
    to have it: `chance` [N] is the logarithm of `inclusion`.
    """
    said = words[:, 1:] != OUTSIDE
    queries, target = model(words[:, :-1].clamp(min=0))[said], words[:, 1:][said]
    others = drawn.multinomial(min(config.samples, len(drawn)))
    scores = queries @ model.vectors(others).T + model.bias[others]
    own = (queries * model.vectors(target)).sum(1) + model.bias[target]
    scores = scores.masked_fill(target[:, None] == others, -torch.inf) - chance[others]
    total = torch.cat([own[:, None], scores], 1).logsumexp(1)
    loss: Tensor = (total - own).mean() + config.normalisation * (total**2).mean()
    return loss
