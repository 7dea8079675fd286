"""What a load run measured, stream by stream, and its report. No sockets."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

PERCENTILES = (50, 90, 95, 99)


@dataclass
class Measured:
    """One stream. Times in seconds.

    Attributes:
        index: which stream.
        audio_s: audio it sent.
        first_s: from its first piece of audio to its first character; None if it had none.
        lags_s: of each character, from the sending of the piece that completed its frame to its arrival.
        final_s: from its finish message to the end message; None if that did not come.
        late_s: of each piece, how long after its due time it was sent; large values make the run worthless.
        ended_at: when it ended, on the machine's monotonic clock.
        error: what the server said, or why it never began.
        dropped: whether it began and broke off without an error message.
        mismatch: whether its characters or frames differ from the same clip's alone.

    """

    index: int
    audio_s: float = 0.0
    first_s: float | None = None
    lags_s: list[float] = field(default_factory=list)
    final_s: float | None = None
    late_s: list[float] = field(default_factory=list)
    ended_at: float = 0.0
    error: str | None = None
    dropped: bool = False
    mismatch: bool = False


@dataclass(frozen=True)
class ServerUse:
    """What the server used meanwhile: mean cores, and resident bytes before the streams came and while they ran."""

    cores: float
    rss_before: int
    rss_during: int


@dataclass(frozen=True)
class Run:
    """A whole load run."""

    streams: list[Measured]
    began_at: float
    use: ServerUse | None

    def report(self) -> dict[str, Any]:
        """What `bench --json` prints. Percentiles are null where nothing was measured."""
        s = self.streams
        audio = sum(m.audio_s for m in s if m.final_s is not None)
        wall = max((m.ended_at for m in s), default=self.began_at) - self.began_at
        errors = [m.error for m in s if m.error]
        use = self.use
        return {
            "streams": len(s),
            "errors": len(errors),
            "dropped": sum(m.dropped for m in s),
            "mismatches": sum(m.mismatch for m in s),
            "rtfx": round(audio / wall, 2) if wall > 0 else 0.0,
            "emission_lag_ms": percentiles_ms([lag for m in s for lag in m.lags_s]),
            "first_character_ms": percentiles_ms([m.first_s for m in s if m.first_s is not None]),
            "finalisation_ms": percentiles_ms([m.final_s for m in s if m.final_s is not None]),
            "sender_late_ms": percentiles_ms([late for m in s for late in m.late_s]),
            "worst_client": self._worst(),
            "server_cpu_cores": round(use.cores, 3) if use else None,
            "server_rss_bytes": use.rss_during if use else None,
            "server_rss_bytes_per_stream": (use.rss_during - use.rss_before) // len(s) if use and s else None,
            "error_messages": sorted(set(errors))[:10],
        }

    def _worst(self) -> dict[str, Any] | None:
        """The stream whose characters lagged most, by its own 99th percentile."""
        heard = [m for m in self.streams if m.lags_s]
        if not heard:
            return None
        worst = max(heard, key=lambda m: percentile(m.lags_s, 99))
        final_ms = None if worst.final_s is None else _ms(worst.final_s)
        return {"stream": worst.index, "emission_lag_ms": percentiles_ms(worst.lags_s), "finalisation_ms": final_ms}


def percentile(values: Sequence[float], q: float) -> float:
    """The smallest value with at least `q` percent of `values` at or below it."""
    return sorted(values)[max(0, math.ceil(len(values) * q / 100) - 1)]


def percentiles_ms(values: Sequence[float]) -> dict[str, float | None]:
    """p50, p90, p95, p99 and the largest of seconds, in ms."""
    ordered = sorted(values)
    found = {f"p{q}": _ms(percentile(ordered, q)) if ordered else None for q in PERCENTILES}
    return found | {"max": _ms(ordered[-1]) if ordered else None}


def keeps_up(report: dict[str, Any], limit_ms: float) -> bool:
    """Whether nothing failed and p99 of the emission lag is within `limit_ms`."""
    p99 = report["emission_lag_ms"]["p99"]
    whole = not (report["errors"] or report["dropped"] or report["mismatches"])
    return whole and p99 is not None and p99 <= limit_ms


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 1)
