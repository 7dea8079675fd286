"""Counters of a running server, in Prometheus' text format. One registry for each server."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest


class Metrics:
    """What `/metrics` shows."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.streams = Gauge("mocha_streams", "Streams open now", registry=self.registry)
        self.refused = Counter(
            "mocha_refused_total", "Streams refused because the server was full", registry=self.registry
        )
        self.audio = Counter("mocha_audio_seconds_total", "Audio recognised", registry=self.registry)
        self.compute = Counter("mocha_compute_seconds_total", "Time spent in model steps", registry=self.registry)
        buckets = (1, 2, 4, 8, 16, 32, 64, 128, 256)
        self.rows = Histogram("mocha_step_rows", "Streams in a step", registry=self.registry, buckets=buckets)

    def observe(self, audio_s: float, rows: int, compute_s: float) -> None:
        """One model step."""
        self.audio.inc(audio_s)
        self.compute.inc(compute_s)
        self.rows.observe(rows)

    def text(self) -> bytes:
        """Everything, for a scraper."""
        return generate_latest(self.registry)
