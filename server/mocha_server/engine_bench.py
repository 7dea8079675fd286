"""`bench --engine`: the engine under paced streams in this process, without sockets or sessions.

The load generator finds `prepare` by its entry point, and reports what it returns.
"""

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mocha_model.allocator import keep_memory
from mocha_model.emissions import Emission
from mocha_model.recognizer import Recognizer
from mocha_server.audio import Float, as_float
from mocha_server.engine import Engine, Limits
from mocha_server.settings import Settings
from mocha_server.stream import EngineError, Stream

Frames = list[tuple[str, int]]
Row = dict[str, Any]  # the fields of the load generator's `Measured`


def prepare(clips: list[bytes], piece_ms: int, device: str) -> Callable[[int, float], dict[str, Any]]:
    """A function that runs N streams begun within so many seconds; stream i says clip ``i % len(clips)`` (s16le).

    It returns the rows, the mean number of cores used meanwhile, and the memory of the process before and at the end.
    Raises ValueError where there is no such device, or no usable checkpoint.
    """
    if device != "cpu" and not (device == "cuda" and torch.cuda.is_available()):
        raise ValueError(f"--device {device}: there is {'cpu and cuda' if torch.cuda.is_available() else 'cpu alone'}")
    settings = Settings()
    torch.set_num_threads(settings.threads)
    keep_memory()
    recognizer = Recognizer.load(settings.model, device)
    audio = [as_float(np.frombuffer(clip, "<i2")) for clip in clips]
    alone = [_frames(recognizer.transcribe(torch.from_numpy(samples).to(device))) for samples in audio]
    piece = recognizer.sample_rate * piece_ms // 1000

    def run(streams: int, spread_s: float) -> dict[str, Any]:
        engine = Engine(recognizer, Limits(streams, settings.block_ms, settings.max_buffer_s))
        engine.start()
        before = _rss_bytes()
        try:
            began, used = time.monotonic(), time.process_time()
            rows = asyncio.run(_run(engine, audio, alone, streams, piece, spread_s))
            cores = (time.process_time() - used) / (time.monotonic() - began)
            return {"rows": rows, "cores": cores, "rss_before": before, "rss_during": _rss_bytes()}
        finally:
            engine.stop()

    return run


async def _run(
    engine: Engine, audio: list[Float], alone: list[Frames], streams: int, piece: int, spread_s: float
) -> list[Row]:
    began = asyncio.get_running_loop().time() + 0.1

    def one(index: int) -> "asyncio.Task[Row]":
        voice = _Voice(engine.open(live=True), audio[index % len(audio)], piece, engine.info.sample_rate)
        due = began + spread_s * index / streams
        return asyncio.create_task(voice.run(index, due, alone[index % len(alone)]))

    return await asyncio.gather(*(one(index) for index in range(streams)))


class _Voice:
    """One stream: its audio, paced, and what comes back."""

    def __init__(self, stream: Stream, samples: Float, piece: int, rate: int) -> None:
        self._stream, self._samples, self._piece, self._rate = stream, samples, piece, rate
        self._sent_at: list[float] = []
        self._late_s: list[float] = []
        self._finished_at = 0.0

    async def run(self, index: int, due: float, expected: Frames) -> Row:
        """Speak and listen; gives a row of the report."""
        info, frames, lags, first_s = self._stream.engine.info, Frames(), list[float](), None
        feeder = asyncio.create_task(self._feed(due))
        error = None
        try:
            async for emissions in self._stream.events():
                now = time.monotonic()
                found = [e for e in emissions if not e.end_of_segment]
                if found and first_s is None:
                    first_s = now - self._sent_at[0]
                for e in found:
                    heard = e.frame * info.frame_samples + info.latency_samples + info.look_ahead_samples
                    place = (heard - 1) // self._piece
                    lags.append(now - (self._sent_at[place] if place < len(self._sent_at) else self._finished_at))
                frames += _frames(found)
        except EngineError as failure:
            error = f"{failure.code}: {failure}"
        now = time.monotonic()
        feeder.cancel()
        await asyncio.gather(feeder, return_exceptions=True)
        return {
            "index": index,
            "audio_s": len(self._samples) / self._rate,
            "first_s": first_s,
            "lags_s": lags,
            "final_s": None if error else now - self._finished_at,
            "late_s": self._late_s,
            "ended_at": now,
            "error": error,
            "mismatch": frames != expected,
        }

    async def _feed(self, due: float) -> None:
        for start in range(0, len(self._samples), self._piece):
            due += self._piece / self._rate
            await asyncio.sleep(due - time.monotonic())
            self._late_s.append(time.monotonic() - due)
            self._sent_at.append(time.monotonic())
            await self._stream.write(self._samples[start : start + self._piece])
        self._finished_at = time.monotonic()
        self._stream.finish()


def _frames(emissions: list[Emission]) -> Frames:
    return [(e.text, e.frame) for e in emissions if not e.end_of_segment]


def _rss_bytes() -> int:
    """Resident memory of this process (Linux; 0 elsewhere)."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
