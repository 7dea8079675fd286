"""Numbers of a running server, in Prometheus' text format: sums over all processes that serve together."""

import mmap
from bisect import bisect_left
from collections.abc import Iterator
from copy import copy
from itertools import accumulate

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

STREAMS, LAG_S, REFUSED, AUDIO_S, COMPUTE_S, ROWS, FIRST_BUCKET = range(7)  # columns of the table
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # streams in a step; one more for larger steps
GREEDY, PATIENT, FILES = range(3)  # engines of a process
ENGINES = ("greedy", "patient", "files")  # as labels
COUNTED_WITH = {GREEDY: [GREEDY, PATIENT], PATIENT: [GREEDY, PATIENT], FILES: [FILES]}
NUM_COLUMNS = FIRST_BUCKET + len(BUCKETS) + 1


class Metrics:
    """A table in memory that forked processes share: a row for each of their engines, written by its owner only."""

    def __init__(self, processes: int = 1) -> None:
        memory = mmap.mmap(-1, 8 * len(COUNTED_WITH) * processes * NUM_COLUMNS)
        self._table = np.frombuffer(memory, np.float64).reshape(len(COUNTED_WITH), processes, NUM_COLUMNS)
        self._engine = GREEDY
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self.become(0)

    def become(self, process: int) -> None:
        """Say which row is this process's; one that takes another's place has no streams, but its counters."""
        self._process, self._own = process, self._table[self._engine, process]
        self.set_streams(0)
        self.set_lag(0.0)

    def beside(self, engine: int) -> "Metrics":
        """The same table for another engine of this process: `PATIENT` or `FILES`."""
        other = copy(self)
        other._engine = engine
        other.become(self._process)
        return other

    def set_streams(self, count: int) -> None:
        """Streams that this process has open."""
        self._own[STREAMS] = count

    def set_lag(self, lag_s: float) -> None:
        """By how much the audio of this process' live streams is late."""
        self._own[LAG_S] = lag_s

    @property
    def streams(self) -> int:
        """Live streams open, or files, whichever these are of, in all processes."""
        return int(self._table[COUNTED_WITH[self._engine], :, STREAMS].sum())

    def refuse(self) -> None:
        """Count a stream that was not admitted."""
        self._own[REFUSED] += 1

    def observe(self, audio_s: float, rows: int, compute_s: float) -> None:
        """Count one model step."""
        self._own[AUDIO_S] += audio_s
        self._own[COMPUTE_S] += compute_s
        self._own[ROWS] += rows
        self._own[FIRST_BUCKET + bisect_left(BUCKETS, rows)] += 1

    def collect(self) -> Iterator[Metric]:
        """What the registry shows."""
        total = self._table.sum(axis=(0, 1)).tolist()
        sums, lags = self._table.sum(axis=1), self._table[..., LAG_S].max(axis=1)
        for kind, name, what, values in (
            (GaugeMetricFamily, "mocha_streams", "Streams open now", sums[:, STREAMS]),
            (GaugeMetricFamily, "mocha_lag_seconds", "How late live audio is, in the latest process", lags),
            (CounterMetricFamily, "mocha_refused", "Streams refused because the server was full", sums[:, REFUSED]),
            (CounterMetricFamily, "mocha_audio_seconds", "Audio recognised", sums[:, AUDIO_S]),
            (CounterMetricFamily, "mocha_compute_seconds", "Time spent in model steps", sums[:, COMPUTE_S]),
        ):
            metric = kind(name, what, labels=["engine"])
            for engine, value in zip(ENGINES, values.tolist(), strict=True):
                metric.add_metric([engine], value)
            yield metric
        names = [*(str(float(bound)) for bound in BUCKETS), "+Inf"]
        buckets = list(zip(names, accumulate(total[FIRST_BUCKET:]), strict=True))
        yield HistogramMetricFamily("mocha_step_rows", "Streams in a step", buckets, total[ROWS])

    def text(self) -> bytes:
        """Everything, for a scraper."""
        return generate_latest(self._registry)
