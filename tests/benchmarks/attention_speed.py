"""How fast attention is: decoding as in the papers' synthetic benchmarks, and the cost of a training step.

Decoding (Raffel 2017, appendix F; Chiu & Raffel 2018, appendix B): attention alone over random memories and decoder
states of 256 dimensions, in compiled single-threaded code, so that no framework hides the complexity. Energies are dot
products of state and memory (eq. 17 with W folded into the memory), uniform in [-1, 1] as in the paper; half of all
inspections select, so the pointer moves by one entry per output on average.

Training: forward and backward of one output step of each mechanism over the time of softmax attention, B = 16; then
the whole decoder in a training step, in expectation and along a given path.

Run: make bench-attention (writes docs/attention/speed.png and docs/attention/speed.json)
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import matplotlib
import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table

from mocha_model.allocator import keep_memory
from mocha_model.attention import Attention, Memory
from mocha_model.config import AttentionConfig, small
from mocha_model.decoder import Decoder

matplotlib.use("Agg")
from matplotlib.figure import Figure

Array = NDArray[np.float32]
SIZE = 256
TRIALS = 100
DECODED = {"softmax": 0, "w = 1": 1, "w = 2": 2, "w = 4": 4, "w = 8": 8}
console = Console(stderr=True)


@njit(fastmath=True)
def _dot(a, b):  # type: ignore[no-untyped-def]
    total = np.float32(0)
    for k in range(a.shape[0]):
        total += a[k] * b[k]
    return total


@njit(fastmath=True)
def _attend(state, memory, first, last, energies, context):  # type: ignore[no-untyped-def]
    """Softmax attention over memory[first:last], into `context`."""
    largest = np.float32(-1e30)
    for j in range(first, last):
        energies[j - first] = _dot(state, memory[j])
        largest = max(largest, energies[j - first])
    total = np.float32(0)
    for n in range(last - first):
        energies[n] = math.exp(energies[n] - largest)
        total += energies[n]
    context[:] = 0
    for n in range(last - first):
        weight = energies[n] / total
        for k in range(context.shape[0]):
            context[k] += weight * memory[first + n, k]


@njit(fastmath=True)
def soft(memory, states, contexts):  # type: ignore[no-untyped-def]
    """Softmax attention of every state over the whole memory."""
    energies = np.empty(memory.shape[0], np.float32)
    for i in range(states.shape[0]):
        _attend(states[i], memory, 0, memory.shape[0], energies, contexts[i])


@njit(fastmath=True)
def chunkwise(memory, states, contexts, width):  # type: ignore[no-untyped-def]
    """Chiu & Raffel 2018, algorithm 1 without the decoder; width 1 is hard monotonic attention."""
    energies = np.empty(width, np.float32)
    pointer = 0
    for i in range(states.shape[0]):
        while pointer < memory.shape[0] and _dot(states[i], memory[pointer]) < 0:  # p < 0.5
            pointer += 1
        if pointer == memory.shape[0]:
            contexts[i:] = 0  # nothing is left to select
            return
        if width == 1:
            contexts[i] = memory[pointer]
        else:
            _attend(states[i], memory, max(0, pointer - width + 1), pointer + 1, energies, contexts[i])


def time_decoding(length: int, width: int, rng: np.random.Generator, min_seconds: float = 2e-4) -> float:
    """Mean seconds for all contexts of `length` outputs over `length` entries, over TRIALS random inputs."""
    spent = 0.0
    for _ in range(TRIALS):
        memory, states = (rng.uniform(-1, 1, (length, SIZE)).astype(np.float32) for _ in range(2))
        contexts = np.empty_like(states)
        repeats, began = 0, time.perf_counter()
        # Short runs are repeated until the clock can tell.
        while not repeats or time.perf_counter() - began < min_seconds:
            if width:
                chunkwise(memory, states, contexts, width)
            else:
                soft(memory, states, contexts)
            repeats += 1
        spent += (time.perf_counter() - began) / repeats
    return spent / TRIALS


def decoding(lengths: list[int]) -> dict[str, list[float]]:
    """Seconds by mechanism and length."""
    rng = np.random.default_rng(0)
    for width in DECODED.values():
        time_decoding(4, width, rng, 0)  # compile
    times: dict[str, list[float]] = {name: [] for name in DECODED}
    for length in track(lengths, "decoding", console=console, transient=True):
        for name, width in DECODED.items():
            times[name].append(time_decoding(length, width, rng))
    return times


def _repeat(work: Callable[[], None], seconds: float) -> float:
    work()
    samples, began = [], time.perf_counter()
    while time.perf_counter() - began < seconds or len(samples) < 5:
        start = time.perf_counter()
        work()
        samples.append(time.perf_counter() - start)
    return float(np.median(samples))


def _training_step(layer: Attention, query: torch.Tensor, memory: Memory, previous: torch.Tensor) -> None:
    fresh = replace(memory, directions=layer.energies.directions())
    layer.expect(query, fresh, previous, 1.0).context.square().sum().backward()  # type: ignore[no-untyped-call]


TRAINED = {
    "softmax": AttentionConfig(mechanism="softmax"),
    "monotonic": AttentionConfig(mechanism="monotonic"),
    "monotonic, simplified": AttentionConfig(mechanism="monotonic", alpha="simplified"),
    "mocha w = 2": AttentionConfig(chunk_width=2),
    "mocha w = 4": AttentionConfig(chunk_width=4),
    "mocha w = 8": AttentionConfig(chunk_width=8),
    "matcha": AttentionConfig(mechanism="matcha"),
}


def training(lengths: list[int], seconds: float) -> dict[str, list[float | None]]:
    """Median seconds of one output step, forward and backward, B = 16, d = 128; None where memory would not do."""
    times: dict[str, list[float | None]] = {name: [] for name in TRAINED}
    for length in lengths:
        values, query = torch.randn(16, length, SIZE), torch.randn(16, SIZE)
        mask = torch.ones(16, length, dtype=torch.bool)
        for name, config in track(TRAINED.items(), f"training, T = {length}", console=console, transient=True):
            if config.mechanism == "matcha" and length > 500:  # float64 [16, T, T] several times over
                times[name].append(None)
                continue
            torch.manual_seed(0)
            layer = Attention(SIZE, SIZE, config)
            ready = layer.prepare(values, mask)
            keys = ready.keys.detach().requires_grad_()
            previous = torch.softmax(torch.randn(16, length), 1)

            leaf = replace(ready, keys=keys)
            work = partial(_training_step, layer, query, leaf, previous)
            times[name].append(_repeat(work, seconds))
    return times


def whole_decoder(lengths: list[int], seconds: float) -> dict[str, list[float | None]]:
    """Median seconds of the decoder's part of a training step, B = 16, one token for each four frames."""
    config = small(32)
    ways = {"softmax": "softmax", "mocha, expected": "mocha", "mocha, along the path": "mocha"}
    times: dict[str, list[float | None]] = {name: [] for name in ways}
    for length in lengths:
        encoded, tokens = (
            torch.randn(16, length, config.encoder.projection_size),
            torch.randint(4, 32, (16, length // 4)),
        )
        frames = torch.arange(3, length, 4).expand(16, -1)
        num_tokens, mask = torch.full((16,), tokens.shape[1]), torch.ones(16, length, dtype=torch.bool)
        for name, mechanism in track(ways.items(), f"decoder, T = {length}", console=console, transient=True):
            torch.manual_seed(0)
            decoder = Decoder(config.with_attention(mechanism=mechanism))

            def work(decoder: Decoder = decoder, along: bool = name.endswith("path")) -> None:
                memory = decoder.attention.prepare(encoded, mask)  # noqa: B023 used at once
                if along:
                    result = decoder.along_path(memory, tokens, num_tokens, frames)  # noqa: B023
                    loss = result.logits.logsumexp(-1).sum() + result.energies.sum()
                else:
                    loss = decoder.teacher_forced(memory, tokens, 1.0).logits.logsumexp(-1).sum()  # noqa: B023
                loss.backward()  # type: ignore[no-untyped-call]

            times[name].append(_repeat(work, seconds))
    return times


def show(lengths: list[int], times: dict[str, list[float]] | dict[str, list[float | None]], title: str) -> None:
    """Milliseconds, and the ratio to softmax attention."""
    table = Table("T", *times, title=title)
    for i, length in enumerate(lengths):
        base = times["softmax"][i]
        assert base is not None
        row = (times[name][i] for name in times)
        table.add_row(str(length), *("-" if t is None else f"{1000 * t:.4g} ({t / base:.2g})" for t in row))
    Console().print(table)


def draw(lengths: list[int], times: dict[str, list[float]], target: Path) -> None:
    """Time and speedup against length, as the papers' figures 8 and 3."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, row in times.items():
        left.plot(lengths, [1000 * t for t in row], marker=".", label=name)
        if name != "softmax":
            right.plot(lengths, [b / t for t, b in zip(row, times["softmax"], strict=True)], marker=".", label=name)
    left.set(xlabel="T = U", ylabel="ms for all outputs", yscale="log", xscale="log", title="time")
    right.set(xlabel="T = U", ylabel="times as fast as softmax attention", xscale="log", yscale="log", title="speedup")
    left.legend()
    right.legend()
    figure.savefig(target, dpi=110)


def main() -> None:
    """Measure, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("docs/attention"))
    parser.add_argument("--seconds", type=float, default=1.0, help="per training measurement")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_memory()  # as docs/decisions/0005 advises for training: else much of the time is that of asking for memory
    options.out.mkdir(parents=True, exist_ok=True)
    lengths = [*range(10, 101, 10), 200, 400, 800]
    decoded = decoding(lengths)
    show(lengths, decoded, "decoding, ms (over softmax)")
    slopes = {n: float(np.polyfit(lengths[-6:], row[-6:], 1)[0]) for n, row in decoded.items() if n != "softmax"}
    straight = {n: float(np.corrcoef(lengths, row)[0, 1] ** 2) for n, row in decoded.items()}
    console.print("microseconds per output: " + ", ".join(f"{n}: {1e6 * s:.3f}" for n, s in slopes.items()))
    console.print("R^2 of a straight line: " + ", ".join(f"{n}: {r:.4f}" for n, r in straight.items()))
    trained_lengths = [250, 500, 1000, 2000]
    trained = training(trained_lengths, options.seconds)
    show(trained_lengths, trained, "training step, forward and backward, ms (over softmax)")
    decoder_lengths = [50, 100, 250, 500]
    decoders = whole_decoder(decoder_lengths, options.seconds)
    show(decoder_lengths, decoders, "the whole decoder in a training step, U = T / 4, ms (over softmax)")
    draw(lengths, decoded, options.out / "speed.png")
    result = {
        "decoding": {"lengths": lengths, "seconds": decoded, "slope_s_per_output": slopes, "r_squared": straight},
        "training": {"lengths": trained_lengths, "seconds": trained},
        "decoder": {"lengths": decoder_lengths, "seconds": decoders},
    }
    (options.out / "speed.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
