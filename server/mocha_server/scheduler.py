"""Which streams go into the next batch. Pure arithmetic: no torch, no threads, no clock of its own.

All rows of a batch get the same number of samples, whole blocks, so that nothing in the model has to be ragged. Two
kinds of rows have batches of their own: fresh ones, whose analysis window is still empty, and ones at their end.

Steps come in few shapes: the libraries below keep something for each shape they have met, and a server can only claim
beforehand what it can list.
"""

from collections.abc import Iterable
from dataclasses import dataclass

SIZES = (1, 2, 4, *range(8, 32, 4), *range(32, 64, 8), *range(64, 128, 16), *range(128, 256, 32))  # rows of a step
CUT_ROWS = 64  # with so many, the newest rows wait for the next step rather than fewer rows being padded to a size
AHEAD_S = 1.0  # of real time; a live stream that is further ahead waits as a file does
MAX_BESIDE_LIVE = 2  # files, and live streams far ahead of real time, in a step with other live ones
MAX_ENDING = 64  # rows at their end in one step, each of which gets a tail of silence besides


@dataclass(eq=False, slots=True)
class Candidate:
    """A stream as the scheduler sees it.

    Attributes:
        key: names the stream.
        live: false for file uploads, which yield to live streams.
        buffered: samples waiting.
        due: when the oldest of them should be heard, in seconds of any clock: when they came, or when they would have
            been spoken if that is later, so that a stream faster than real time has to wait for the others.
        ending: no more audio will come.
        fresh: nothing was heard yet.

    """

    key: int
    live: bool
    buffered: int = 0
    due: float = 0.0
    ending: bool = False
    fresh: bool = False


@dataclass(frozen=True, slots=True)
class Work:
    """Take `num_samples` of stream `key`, the first ones if it is `fresh`; `flush` it afterwards."""

    key: int
    num_samples: int
    flush: bool
    fresh: bool = False


@dataclass(frozen=True)
class Scheduler:
    """Earliest deadline first, live before files and before live streams that are far ahead of real time.

    Attributes:
        block: samples that make a stream ready.
        largest: most samples taken from one stream in one step; steps take 1, 2, 4 ... blocks.
        max_rows: most streams in one step; half as many for each doubling beyond two blocks, to bound its memory.
        head_start: samples by which the first block of a stream is shorter: it gives as many frames as the others,
            since a frame's window reaches beyond the frame by less than a frame.

    """

    block: int
    largest: int
    max_rows: int
    head_start: int = 0

    def takes(self) -> list[int]:
        """Samples that a step may take of each row, except of rows at their end."""
        return [self.block << k for k in range((self.largest // self.block).bit_length())]

    def sizes(self, whole: int) -> list[int]:
        """Rows, padding included, that a step of `whole` samples may have; 0 samples are rows at their end."""
        most = max(1, min(self.max_rows, 2 * self.max_rows * self.block // whole if whole else MAX_ENDING))
        return [size for size in SIZES if size < most] + [most]

    def padded(self, works: list[Work]) -> int:
        """How many rows the step of these has."""
        blocks = 0 if works[0].flush else -(-works[0].num_samples // self.block)
        return next(size for size in self.sizes(blocks * self.block) if size >= len(works))

    def is_ready(self, c: Candidate) -> bool:
        """Whether there is something to do for a stream."""
        return c.ending or self._whole(c) > 0

    def choose(self, ready: Iterable[Candidate], now: float) -> list[Work]:
        """The next batch of those that are `ready`, empty if none is; `now` is the time by the clock of their `due`."""
        live: list[Candidate] = []
        others: list[Candidate] = []
        for c in sorted(ready, key=lambda c: c.due):
            (live if c.live and c.due <= now + AHEAD_S else others).append(c)
        if not (first := next(iter(live or others), None)):
            return []
        kind = self._kind(first)
        batch = [c for c in live if self._kind(c) == kind]
        batch += [c for c in others if self._kind(c) == kind][: MAX_BESIDE_LIVE if live else None]
        if self._at_end(first):
            return [Work(c.key, c.buffered, True, c.fresh) for c in batch[: self._rows(0, len(batch))]]
        wholes = [self._whole(c) for c in batch]
        take = self._take(wholes)
        batch = [c for c, whole in zip(batch, wholes, strict=True) if whole >= take]
        return [Work(c.key, take - self._shorter(c), False, c.fresh) for c in batch[: self._rows(take, len(batch))]]

    def _take(self, wholes: list[int]) -> int:
        """How much to take of each row, when there are `wholes`: what gives most audio in all, the first row in it."""
        takes = [take for take in self.takes() if take <= wholes[0]]
        return max(takes, key=lambda take: (take * self._rows(take, sum(w >= take for w in wholes)), take))

    def _rows(self, whole: int, count: int) -> int:
        """How many of `count` rows go into a step of `whole` samples."""
        sizes = self.sizes(whole)
        fit = max(size for size in sizes if size <= count)
        return fit if count >= CUT_ROWS or fit == sizes[-1] else count

    def _kind(self, c: Candidate) -> tuple[bool, bool]:
        """Rows of one step are of one kind: at their end, or else fresh or not."""
        at_end = self._at_end(c)
        return at_end, c.fresh and not at_end

    def _shorter(self, c: Candidate) -> int:
        return self.head_start if c.fresh else 0

    def _whole(self, c: Candidate) -> int:
        """Samples of whole blocks, as long as a stream that is not fresh would need."""
        return min(c.buffered + self._shorter(c), self.largest) // self.block * self.block

    def _at_end(self, c: Candidate) -> bool:
        return c.ending and self._whole(c) == 0
