"""How words sound, beside how they are spelled: what a CTC head of phones says of each word that a search has written.

English spelling tells little of its sounds, so phones and characters err in different places. A word is scored when
the search has finished writing it, by how much less likely it is that what was heard up to there begins with its phones
after those of the words before (prefix probabilities: Graves et al. 2006, section 3.2). Since CTC shares out all
probability among texts, prefixes of different lengths can be compared. Knows nothing of characters or networks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from mocha_model.streaming import map_state

REACH = 64  # frames, of 2.3 s: what a word may have lasted
WORST = -20.0  # what a word with phones gains at least
UNKNOWN = -4.0  # what a word without phones gains
ASTRAY = -1.0  # what a character gains with which a prefix begins no word
NONE = -torch.inf
STRANGE = 0.05  # share of words that may have phones that are not heard
AT_ONCE = 1024  # rows, so that memory stays small where many segments end together
NOTHING = math.exp(-70)  # a probability that adds nothing to what gains more than `WORST`
LEAST_LOG_PROB = -50.0  # of a log-probability, so that sums over all frames are exact enough


@dataclass(frozen=True)
class Lexicon:
    """The phones of V words.

    Attributes:
        phones: what the labels from 1 on stand for; 0 is the blank.
        labels: [V, N] int64, each word's, then zeros.
        lengths: [V] int64; 0 for a word whose phones are not known.

    """

    phones: tuple[str, ...]
    labels: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, said: Sequence[tuple[str, ...]], phones: tuple[str, ...]) -> "Lexicon | None":
        """Of words that are `said` so, () where that is not known, as it is not of words with others than `phones`.

        None where those are more than one in twenty: they are of another notation.
        """
        number = _numbers(phones)
        rows = [[number.get(phone, 0) for phone in word] for word in said]
        strange = sum(not all(row) for row in rows)
        if strange > STRANGE * sum(map(bool, rows)):
            return None
        rows = [row if all(row) else [] for row in rows]
        lengths = np.array([len(row) for row in rows])
        labels = np.zeros((len(rows), lengths.max()), dtype=np.int64)
        labels[np.arange(lengths.max()) < lengths[:, None]] = [label for row in rows for label in row]
        return cls(phones, torch.from_numpy(labels), torch.from_numpy(lengths))

    def labels_of(self, said: tuple[str, ...]) -> list[int]:
        """Of another word that is `said` so; none of one that has other phones, or more than any of these words."""
        number = _numbers(self.phones)
        row = [number.get(phone, 0) for phone in said]
        return row if all(row) and len(row) <= self.labels.shape[1] else []


@dataclass(frozen=True)
class Heard:
    """What is left of the words before, of R rows: logarithms of CTC's forward variables after their last phone.

    Divided by the prefix probability of these words.

    Attributes:
        blank, label: [R, K] float32, of alignments that end in a blank and in the last phone, at each of the K frames
            up to `until`.
        until: [R] int64, the frame at which the last word was read. last: [R] int64, its last phone, 0 for none.

    """

    blank: Tensor
    label: Tensor
    until: Tensor
    last: Tensor


class WordReader:
    """Reads words out of the log-probabilities of phones, a word at a time."""

    def __init__(self, lexicon: Lexicon, weight: float, bonus: float) -> None:
        """`weight` is of the logarithm of probabilities, `bonus` added per phone."""
        self.lexicon, self.weight, self.bonus = lexicon, weight, bonus
        self.num_labels = len(lexicon.phones) + 1

    def init_state(self, start: Tensor) -> Heard:
        """Rows that have read nothing before frames `start` [R]."""
        nothing = torch.full((len(start), REACH), NONE, device=start.device)
        blank = nothing.clone()
        blank[:, -1] = 0
        return Heard(blank, nothing, start - 1, torch.zeros_like(start))

    def read(
        self, state: Heard, word: Tensor, log_probs: Tensor, stream: Tensor, now: Tensor, other: Tensor | None = None
    ) -> tuple[Heard, Tensor]:
        """Read `word` [R] int64 (-1 for none) out of the frames of `stream` [R] up to `now` [R], its newest.

        `log_probs` [B, K, P] float32 are those of all streams; `other` [R, N] int64 has labels of words that the
        lexicon has none of, then zeros. Returns the state after, and what each row gains, [R]. A word whose phones are
        not known is as likely to have ended at any of the frames, and gains `UNKNOWN`.
        """
        number = word.clamp(min=0).cpu()
        count = torch.where(word < 0, 0, self.lexicon.lengths[number].to(word.device))
        labels = self.lexicon.labels[number].to(word.device)
        if other is not None:
            labels = torch.where((count == 0)[:, None], other, labels)
            count = torch.where(word < 0, 0, (labels > 0).sum(1))
        probs = log_probs.clamp(min=LEAST_LOG_PROB).exp().transpose(0, 1)
        parts = [slice(n, n + AT_ONCE) for n in range(0, max(len(word), 1), AT_ONCE)]
        rows = (map_state(lambda x, p=p: x[p], (state, labels, count, stream, now)) for p in parts)
        blank, label, reached = (torch.cat(x) for x in zip(*(_spoken(probs, *part) for part in rows), strict=True))
        unknown = (word >= 0) & (count == 0)
        gain = (self.weight * reached + self.bonus * count).clamp(min=WORST)
        gain = torch.where(unknown, UNKNOWN, gain)
        reached = reached.clamp(min=WORST / self.weight - self.bonus * self.lexicon.labels.shape[1])
        anywhere = -math.log(log_probs.shape[1])
        blank = torch.where(unknown[:, None], anywhere, blank - reached[:, None])
        label = torch.where(unknown[:, None], NONE, label - reached[:, None])
        last = torch.where(count > 0, labels.gather(1, (count - 1).clamp(min=0)[:, None])[:, 0], state.last)
        return Heard(blank, label, now.clone(), last.masked_fill(unknown, 0)), gain

    def close(
        self, state: Heard, word: Tensor, log_probs: Tensor, stream: Tensor, now: Tensor, other: Tensor | None = None
    ) -> Tensor:
        """What rows gain, [R], if `word` is their last and nothing was said after it; arguments as of `read`."""
        after, gain = self.read(state, word, log_probs, stream, now, other)
        ends = self.weight * torch.logaddexp(after.blank[:, -1], after.label[:, -1])
        return gain + ends.clamp(WORST, 0.0)


def _numbers(phones: tuple[str, ...]) -> dict[str, int]:
    return {phone: n for n, phone in enumerate(phones, 1)}


def _spoken(
    probs: Tensor, state: Heard, labels: Tensor, count: Tensor, stream: Tensor, now: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Forward variables [R, K] after `count` [R] of `labels` [R, N] in `probs` [K, B, P]: of a blank, of the last.

    And the logarithm [R] of how likely it is that this label is reached, by how likely the words before are. Frames
    come first here, then labels, of which the first is the last of the words before. Float64 has room for K frames
    of such probabilities; what falls out of it has long lost.
    """
    most, rows = int(count.max()) if len(count) else 0, torch.arange(len(count), device=count.device)
    before, after, new = _at(state, now)
    first = int(((before + after) > NOTHING).any(1).int().argmax())  # what it says of frames before, nobody asks
    before, after, new, probs = before[first:], after[first:], new[first:], probs[first:]
    spelled = torch.cat([state.last[None], labels[:, :most].T])  # [N + 1, R]
    free = (spelled[1:] != spelled[:-1]).double()  # the same phone again needs a blank between
    own = probs[:, stream, spelled].double()
    silence = probs[:, stream, 0].double()[:, None].repeat(1, most + 1, 1)
    own[:, 0] *= new * (state.last > 0)
    silence[:, 0] *= new
    quiet, spoken = own.new_zeros(2, len(own) + 1, *spelled.shape)
    quiet[:, 0], spoken[:, 0] = before, after
    begins = torch.empty_like(own[:, 1:])
    for t in range(len(own)):
        torch.addcmul(quiet[t, :-1], spoken[t, :-1], free, out=begins[t]).mul_(own[t, 1:])
        spoken[t + 1].addcmul_(spoken[t], own[t])[1:] += begins[t]
        quiet[t + 1].addcmul_(quiet[t] + spoken[t], silence[t])
    blank, label = (pad(x[1:, count, rows].T.log().float(), (first, 0), value=NONE) for x in (quiet, spoken))
    reached = begins.sum(0).log().float()[(count - 1).clamp(min=0), rows] if most else torch.zeros_like(blank[:, 0])
    return blank, label, reached.masked_fill(count == 0, 0.0)


def _at(state: Heard, now: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What is left of the words before at the frame before the K up to `now` [R], and at those: blank, label and `new`.

    All are [K + 1, R] float64 but `new` [K, R], frames that the words before have not been read from: 0 stands there.
    What is further back than K frames is taken to have been silence that costs nothing.
    """
    size, passed = state.blank.shape[1], now - state.until
    at = torch.arange(-1, size, device=now.device)[:, None] + passed  # of the K frames that `state` has
    known = (at >= 0) & (at < size)

    def moved(x: Tensor) -> Tensor:
        return x.double().exp().T.gather(0, at.clamp(0, size - 1)) * known

    blank, label = moved(state.blank), moved(state.label)
    blank[0] += (passed > size) * torch.logaddexp(state.blank[:, -1], state.label[:, -1]).double().exp()
    return blank, label, (at >= size)[1:]
