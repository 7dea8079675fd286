"""How late characters come, what a stream costs in CPU and in memory, against the number of streams.

Starts a server for each number of streams (variables MOCHA_… set it up) and draws a picture.
python tests/benchmarks/capacity.py --manifest $MOCHA_SPEECH/dev.jsonl --workers 2 --out docs/capacity.svg
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt

SHOWN = ("streams", "errors", "mismatches", "server_cpu_cores", "server_rss_bytes_per_stream")
LIMIT_MS = 300


def measure(streams: int, workers: int, seconds: float, manifest: Path) -> dict[str, Any]:
    """One run of `mocha-asr bench`."""
    mocha = str(Path(sys.executable).with_name("mocha-asr"))
    load = ["--streams", str(streams), "--seconds", str(seconds), "--manifest", str(manifest)]
    limits = {"MOCHA_WORKERS": str(workers), "MOCHA_MAX_STREAMS": "100000", "MOCHA_MAX_LAG_MS": "1e9"}
    done = subprocess.run(
        [mocha, "bench", "--serve", *load, "--json"], env=os.environ | limits, stdout=subprocess.PIPE, check=False
    )
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def draw(reports: list[dict[str, Any]], path: Path) -> None:
    """Lag with its limit, CPU and memory, each over the number of streams."""
    streams = [report["streams"] for report in reports]
    figure, (lag, cpu, memory) = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    for q in ("p50", "p99"):
        lag.plot(streams, [report["emission_lag_ms"][q] for report in reports], marker="o", label=q)
    lag.axhline(LIMIT_MS, color="gray", linestyle="--", linewidth=1)
    lag.set(ylabel="emission lag, ms", yscale="log")
    lag.legend()
    cpu.plot(streams, [report["server_cpu_cores"] for report in reports], marker="o")
    cpu.set(ylabel="server, cores", ylim=(0, None))
    memory.plot(streams, [report["server_rss_bytes_per_stream"] / 1000 for report in reports], marker="o")
    memory.set(ylabel="memory per stream, KB", ylim=(0, None))
    for axes in (lag, cpu, memory):
        axes.set_xlabel("streams")
        axes.grid(alpha=0.3)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--manifest", type=Path, required=True)
    parser.add_argument("--streams", type=int, nargs="+", default=[25, 50, 100, 200, 300, 400, 500, 600, 800])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--out", type=Path, required=True, help="picture, .svg or .png")
    options = parser.parse_args()
    reports = []
    for streams in options.streams:
        report = measure(streams, options.workers, options.seconds, options.manifest)
        print(json.dumps({name: report[name] for name in SHOWN} | {"lag": report["emission_lag_ms"]}), flush=True)
        reports.append(report)
        draw(reports, options.out)


if __name__ == "__main__":
    main()
