"""N-grams of words that are counted, and how probable ranges of words are by them. Knows no LSTM, no files."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class WordCounts:
    """What is counted, and most of what a file holds: probability masses of n-grams of V words.

    Word numbers: 0 ... V - 1 alphabetically by their ids of characters, then V, the end of a sentence, and V + 1, its
    beginning (only in contexts). A mass is what an n-gram has itself, without its share of shorter ones.

    Attributes:
        words: the vocabulary, in order.
        unigrams: [V + 1] float32 masses; what they lack of 1 belongs to unknown words.
        bigrams, trigrams: keys [N] int64, rising, ``context * (V + 2) + word``, and masses [N] float32.
        pairs: [C] int64, rising, ``first * (V + 2) + second``: what each context of `trigrams` is. The context of a
            bigram is a word.
        spelling: [S, S] float32, log-probability of a character (column) after another (row); the blank stands for
            the end of a word, the space for its beginning.
        characters: [S] float32, log-probability of each character that words are written with, and of the space, in the
            text; 0 for other symbols.

    """

    words: tuple[str, ...]
    unigrams: NDArray[np.float32]
    bigrams: tuple[NDArray[np.int64], NDArray[np.float32]]
    trigrams: tuple[NDArray[np.int64], NDArray[np.float32]]
    pairs: NDArray[np.int64]
    spelling: NDArray[np.float32]
    characters: NDArray[np.float32]


class Table:
    """N-grams of one length: how much of the words below a number their own masses are, after a context."""

    def __init__(self, keys: NDArray[np.int64], masses: NDArray[np.float32], num_contexts: int, stride: int) -> None:
        self._keys, self._stride = torch.from_numpy(keys), stride
        self._below = torch.from_numpy(np.concatenate([[0.0], np.cumsum(masses, dtype=np.float64)]))
        first = np.searchsorted(keys, np.arange(num_contexts + 2) * stride)
        self.rest = (1 - self._below[first].diff()).clamp(min=1e-6)  # [contexts + 1], 1 for the unknown one

    def below(self, context: Tensor, words: Tensor) -> Tensor:
        """[R, K] float64 for `context` [R] and `words` [R, K]; only differences within a row mean anything."""
        return self._below[torch.searchsorted(self._keys, context[:, None] * self._stride + words)]
