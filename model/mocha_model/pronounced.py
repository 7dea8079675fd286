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

REACH = 64  # frames, of 2.6 s: what a word may have lasted
WORST = -20.0  # what a word with phones gains at least
UNKNOWN = -4.0  # what a word without phones gains
ASTRAY = -1.0  # what a character gains with which a prefix begins no word
NONE = -torch.inf
STRANGE = 0.05  # share of words that may have phones that are not heard
LEAST = -50.0  # of a log-probability, so that sums over all frames are exact enough


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
        number = {phone: n for n, phone in enumerate(phones, 1)}
        rows = [[number.get(phone, 0) for phone in word] for word in said]
        strange = sum(not all(row) for row in rows)
        if strange > STRANGE * sum(map(bool, rows)):
            return None
        rows = [row if all(row) else [] for row in rows]
        lengths = np.array([len(row) for row in rows])
        labels = np.zeros((len(rows), lengths.max()), dtype=np.int64)
        labels[np.arange(lengths.max()) < lengths[:, None]] = [label for row in rows for label in row]
        return cls(phones, torch.from_numpy(labels), torch.from_numpy(lengths))


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

    def read(self, state: Heard, word: Tensor, log_probs: Tensor, stream: Tensor, now: Tensor) -> tuple[Heard, Tensor]:
        """Read `word` [R] int64 (-1 for none) out of the frames of `stream` [R] up to `now` [R], its newest.

        `log_probs` [B, K, P] float32 are those of all streams. Returns the state after, and what each row gains, [R]. A
        word whose phones are not known is as likely to have ended at any of the frames, and gains `UNKNOWN`.
        """
        number = word.clamp(min=0).cpu()
        count = torch.where(word < 0, 0, self.lexicon.lengths[number].to(word.device))
        labels = self.lexicon.labels[number].to(word.device)
        silence, last = _of(log_probs, stream, torch.zeros_like(stream)), state.last
        lasts = _of(log_probs, stream, last).masked_fill((last == 0)[:, None], LEAST)
        blank, label, blank_before, label_before = _until(state, silence, lasts, now)
        reached = torch.zeros_like(blank_before)
        for n in range(int(count.max()) if len(count) else 0):
            reads, phone = n < count, labels[:, n]
            own = _of(log_probs, stream, phone)
            again = (phone == last)[:, None]  # which needs a blank between
            begins = torch.logaddexp(
                _shifted(blank, blank_before), _shifted(label, label_before).masked_fill(again, NONE)
            )
            begins = begins + own
            reached = torch.where(count.eq(n + 1), begins.logsumexp(1), reached)
            spoken = _lasting(own, begins)
            after = _lasting(silence, _shifted(spoken, torch.full_like(blank_before, NONE)) + silence)
            label, blank = (torch.where(reads[:, None], a, b) for a, b in ((spoken, label), (after, blank)))
            blank_before, label_before = (x.masked_fill(reads, NONE) for x in (blank_before, label_before))
            last = torch.where(reads, phone, last)
        unknown = (word >= 0) & (count == 0)
        gain = (self.weight * reached + self.bonus * count).clamp(min=WORST)
        gain = torch.where(unknown, UNKNOWN, gain)
        reached = reached.clamp(min=WORST / self.weight - self.bonus * self.lexicon.labels.shape[1])
        anywhere = -math.log(log_probs.shape[1])
        blank = torch.where(unknown[:, None], anywhere, blank - reached[:, None])
        label = torch.where(unknown[:, None], NONE, label - reached[:, None])
        return Heard(blank, label, now.clone(), last.masked_fill(unknown, 0)), gain

    def close(self, state: Heard, word: Tensor, log_probs: Tensor, stream: Tensor, now: Tensor) -> Tensor:
        """What rows gain, [R], if `word` is their last and nothing was said after it; arguments as of `read`."""
        after, gain = self.read(state, word, log_probs, stream, now)
        ends = self.weight * torch.logaddexp(after.blank[:, -1], after.label[:, -1])
        return gain + ends.clamp(WORST, 0.0)


def _until(state: Heard, silence: Tensor, own: Tensor, now: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`blank` and `label` [R, K] at the K frames up to `now`, and [R] at the frame before those.

    The blank's log-probabilities there are `silence` [R, K], the last phone's `own` [R, K]. What is further back than K
    frames is taken to have been silence that costs nothing.
    """
    size = silence.shape[1]
    passed = (now - state.until)[:, None]
    at = torch.arange(size, device=now.device) + passed
    new = at >= size

    def earlier(x: Tensor) -> tuple[Tensor, Tensor]:
        """`x` [R, K] moved to the new frames, and what stood before the first of them."""
        moved = x.gather(1, at.clamp(max=size - 1)).masked_fill(new, NONE)
        return moved, x.gather(1, (passed - 1).clamp(0, size - 1))[:, 0].masked_fill(passed[:, 0] < 1, NONE)

    (blank, blank_before), (label, label_before) = earlier(state.blank), earlier(state.label)
    far = passed[:, 0] > size
    blank_before = torch.where(far, torch.logaddexp(state.blank[:, -1], state.label[:, -1]), blank_before)
    label_before = label_before.masked_fill(far, NONE)
    first = new & ~_shifted(new, torch.zeros_like(passed[:, 0], dtype=torch.bool))
    goes_on = (_shifted(label, label_before) + own).masked_fill(~first, NONE)
    label = torch.where(new, _lasting(own.masked_fill(~new, 0), goes_on), label)
    rests = (_shifted(label, label_before) + silence).masked_fill(~new, NONE)
    rests = torch.where(first, torch.logaddexp(rests, _shifted(blank, blank_before) + silence), rests)
    blank = torch.where(new, _lasting(silence.masked_fill(~new, 0), rests), blank)
    return blank, label, blank_before, label_before


def _lasting(own: Tensor, begins: Tensor) -> Tensor:
    """Forward variables of a label that begins with `begins` [R, K], its first frame included, and lasts by `own`."""
    all_along = own.cumsum(1)
    return all_along + (begins - all_along).logcumsumexp(1)


def _shifted(x: Tensor, first: Tensor) -> Tensor:
    """`x` [R, K] a frame later, `first` [R] before it."""
    return torch.cat([first[:, None], x[:, :-1]], dim=1)


def _of(log_probs: Tensor, stream: Tensor, label: Tensor) -> Tensor:
    """[R, K] of [B, K, P], for each row's `stream` [R] and `label` [R]."""
    frames = torch.arange(log_probs.shape[1], device=log_probs.device)
    return log_probs[stream[:, None], frames, label[:, None]].clamp(min=LEAST)
