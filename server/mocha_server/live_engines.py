"""The engines of live streams: one reads greedily, another with patience; each stream says which it wants."""

from collections.abc import Iterator
from dataclasses import dataclass

from mocha_server.engine import Engine


@dataclass(frozen=True)
class LiveEngines:
    """Both, or the first alone.

    Attributes:
        greedy: emits each character as soon as it is selected.
        patient: searches for a while before it emits one; None where there is none, and then `greedy` reads all.
        unless_said: whether streams that do not say are read with patience.

    """

    greedy: Engine
    patient: Engine | None = None
    unless_said: bool = False

    def __iter__(self) -> Iterator[Engine]:
        """Those that there are."""
        yield self.greedy
        if self.patient:
            yield self.patient

    def of(self, patient: bool | None) -> Engine:
        """Which reads a stream that wants patience, or none, or does not say."""
        wanted = self.unless_said if patient is None else patient
        return self.patient if wanted and self.patient else self.greedy
