"""Which streams go into the next batch. Pure arithmetic: no torch, no threads, no clock of its own."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """A stream as the scheduler sees it.

    Attributes:
        key: names the stream.
        buffered: samples waiting.
        since: when the oldest of them arrived, in seconds of any clock.
        live: false for file uploads, which yield to live streams.
        ending: no more audio will come.

    """

    key: int
    buffered: int
    since: float
    live: bool
    ending: bool


@dataclass(frozen=True, slots=True)
class Work:
    """Take `num_samples` of stream `key`; `flush` it afterwards."""

    key: int
    num_samples: int
    flush: bool


@dataclass(frozen=True)
class Scheduler:
    """Earliest deadline first, live before files.

    Attributes:
        block: samples that make a live stream ready.
        largest: most samples taken from one stream in one step.
        max_rows: most streams in one step.
        max_files_beside_live: most file streams in a step that also has live ones.

    """

    block: int
    largest: int
    max_rows: int
    max_files_beside_live: int = 2

    def choose(self, candidates: Iterable[Candidate]) -> list[Work]:
        """The next batch, possibly empty."""
        ready = [c for c in candidates if c.buffered >= self.block or c.ending]
        live = sorted((c for c in ready if c.live), key=lambda c: c.since)
        files = sorted((c for c in ready if not c.live), key=lambda c: c.since)
        if live:
            files = files[: self.max_files_beside_live]
        return [self._work(c) for c in (live + files)[: self.max_rows]]

    def _work(self, c: Candidate) -> Work:
        take = min(c.buffered, self.largest)
        if not c.ending and take < c.buffered:
            take = take // self.block * self.block
        return Work(c.key, take, flush=c.ending and take == c.buffered)
