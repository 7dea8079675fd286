"""Which streams go into the next batch. Pure arithmetic: no torch, no threads, no clock of its own.

All rows of a batch get the same number of samples, whole blocks, so that nothing in the model has to be ragged. Two
kinds of rows have batches of their own: fresh ones, whose analysis window is still empty, and ones at their end.
"""

from collections.abc import Iterable
from dataclasses import dataclass


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
    """Earliest deadline first, live before files.

    Attributes:
        block: samples that make a stream ready.
        largest: most samples taken from one stream in one step.
        max_rows: most streams in one step; half as many for each doubling beyond two blocks, to bound its memory.
        head_start: samples by which the first block of a stream is shorter: it gives as many frames as the others,
            since a frame's window reaches beyond the frame by less than a frame.
        max_files_beside_live: most file streams in a step that also has live ones.

    """

    block: int
    largest: int
    max_rows: int
    head_start: int = 0
    max_files_beside_live: int = 2

    def is_ready(self, c: Candidate) -> bool:
        """Whether there is something to do for a stream."""
        return c.ending or self._whole(c) > 0

    def choose(self, candidates: Iterable[Candidate]) -> list[Work]:
        """The next batch, possibly empty."""
        ready = [c for c in candidates if self.is_ready(c)]
        live = sorted((c for c in ready if c.live), key=lambda c: c.due)
        files = sorted((c for c in ready if not c.live), key=lambda c: c.due)
        if not ready:
            return []
        first = (live or files)[0]
        if live:
            files = files[: self.max_files_beside_live]
        if self._at_end(first):
            batch = [c for c in (live + files) if self._at_end(c)]
            return [Work(c.key, c.buffered, True, c.fresh) for c in batch[: self.max_rows]]
        alike = [(c, self._whole(c)) for c in (live + files) if c.fresh == first.fresh]
        take = self._take([whole for _, whole in alike])
        batch = [c for c, whole in alike if whole >= take]
        return [Work(c.key, take - self._shorter(c), False, c.fresh) for c in batch[: self._rows(take)]]

    def _take(self, wholes: list[int]) -> int:
        """How much to take of each row, when there are `wholes`: what gives most audio in all, the first row in it."""
        sizes = range(self.block, wholes[0] + 1, self.block)
        return max(sizes, key=lambda size: (size * min(self._rows(size), sum(w >= size for w in wholes)), size))

    def _rows(self, whole: int) -> int:
        return max(1, min(self.max_rows, 2 * self.max_rows * self.block // whole))

    def _shorter(self, c: Candidate) -> int:
        return self.head_start if c.fresh else 0

    def _whole(self, c: Candidate) -> int:
        """Samples of whole blocks, as long as a stream that is not fresh would need."""
        return min(c.buffered + self._shorter(c), self.largest) // self.block * self.block

    def _at_end(self, c: Candidate) -> bool:
        return c.ending and self._whole(c) == 0
