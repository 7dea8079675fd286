"""What an LSTM over words expects of all words that begin alike, before any of them is complete. Knows no audio.

The LSTM knows its words one by one, so the probability of what is written so far is a sum over all words that begin
with it. The most frequent ones are summed; of the others it is known how probable they are together, and the counts say
how that is distributed among them.
"""

import torch
from torch import Tensor, nn

from mocha_model.quantized import QuantizedLinear
from mocha_model.word_lstm import OTHER, Recalled, WordLSTM

MOST = 3000  # words that are summed
MANY = 24  # from so many words on that begin alike, all are scored and not only these


class WordRanges:
    """Of an LSTM's most frequent words, in the order of the counts' numbers, in which those that begin alike follow."""

    def __init__(self, lstm: WordLSTM, words: Tensor, below: Tensor) -> None:
        """`words` [N - 2] are the counts' numbers of the LSTM's, most frequent first (see `language.Recurrent`).

        `below` [V + 1] float64 are how frequent the words below each number are together.
        """
        numbers, order = words[:MOST].sort()
        index = order + OTHER + 1
        self._vectors, self._bias = lstm.vectors.weight[index].detach(), lstm.bias[index].detach()
        self._all = QuantizedLinear(self._vectors, self._bias)
        self._place = torch.searchsorted(numbers, torch.arange(len(below)))  # how many are below each number
        self._below = below
        self._rare_below = nn.functional.pad(below.diff().index_fill(0, numbers, 0.0).cumsum(0), (1, 0))
        self.share_of_rare = max(1e-6, float(self._rare_below[-1] / below[-1]))

    def rare(self, bounds: Tensor) -> Tensor:
        """What share [R, S] of the words between `bounds` [R, S + 1] is not summed, by how frequent they are."""
        return self._rare_below[bounds].diff(dim=1) / self._below[bounds].diff(dim=1).clamp(min=1e-12)

    def masses(self, recalled: Recalled, bounds: Tensor) -> Tensor:
        """Probability [R, S] float64 that the next word is one of those that are summed between `bounds` [R, S + 1]."""
        place, query = self._place[bounds], recalled.query.float()
        count = place[:, -1] - place[:, 0]
        found = torch.zeros(bounds.shape[0], bounds.shape[1] - 1, dtype=torch.float64)
        for chosen, masses in ((count > MANY, self._of_many), (count <= MANY, self._of_few)):
            if len(rows := chosen.nonzero()[:, 0]):
                found[rows] = masses(query[rows], place[rows])
        return found

    def _of_many(self, query: Tensor, place: Tensor) -> Tensor:
        """All words of each row, in integers, which no row's company changes."""
        p = self._all(query).exp()
        below = nn.functional.pad(p.cumsum(1, dtype=torch.float64), (1, 0))
        return below.gather(1, place).diff(dim=1)

    def _of_few(self, query: Tensor, place: Tensor) -> Tensor:
        """The words of each row, all after each other."""
        count = place[:, -1] - place[:, 0]
        before = count.cumsum(0) - count
        row = torch.arange(len(place)).repeat_interleave(count)
        word = torch.arange(len(row)) + (place[:, 0] - before)[row]
        p = ((self._vectors[word] * query[row]).sum(1) + self._bias[word]).double().exp()
        below = nn.functional.pad(p.cumsum(0), (1, 0))
        return below[place + (before - place[:, 0])[:, None]].diff(dim=1)
