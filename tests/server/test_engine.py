"""The engine by itself: what it admits, what costs it nothing, whose row is whose."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from mocha_model.emissions import Emission, text_of
from mocha_model.recognizer import Recognizer, RecognizerState
from mocha_server.engine import Engine, Limits
from mocha_server.messages import ErrorCode
from mocha_server.stream import EngineError, Stream

BLOCK = 1280  # samples; 80 ms


class Slow(Recognizer):
    """A recogniser on a machine that is too slow for a single stream, once it is `warm`."""

    warm = False

    def step(
        self, samples: Tensor, num_valid: Tensor, state: RecognizerState
    ) -> tuple[list[list[Emission]], RecognizerState]:
        time.sleep(4 * samples.shape[1] / self.sample_rate if self.warm else 0)
        return super().step(samples, num_valid, state)


@pytest.fixture
def engine(lively: Recognizer) -> Any:
    running = Engine(lively, Limits(capacity=8, max_buffer_s=1.0))
    running.start()
    yield running
    running.stop()


def counted(engine: Engine, name: str) -> float:
    """A number that `/metrics` shows, of all engines."""
    samples = [sample for metric in engine.metrics.collect() for sample in metric.samples]
    return sum(sample.value for sample in samples if sample.name == name)


async def speak_and_open_others(stream: Stream) -> None:
    for _ in range(1000):
        await stream.write(np.zeros(BLOCK, np.float32))
        await asyncio.sleep(BLOCK / 16_000)
        stream.engine.open(live=True).close()


async def text(stream: Stream) -> str:
    return text_of([emission async for group in stream.events() for emission in group])


async def test_a_late_engine_refuses_new_streams_until_it_has_caught_up(lively: Recognizer):
    slow = Slow(lively.model, lively.tokenizer, lively.provenance)
    engine = Engine(slow, Limits(capacity=8, max_lag_s=0.2))
    engine.start()
    slow.warm = True
    first = engine.open(live=True)
    with pytest.raises(EngineError, match="at its capacity") as refused:
        await speak_and_open_others(first)
    assert refused.value.code is ErrorCode.SERVER_FULL
    assert counted(engine, "mocha_refused_total") == 1
    assert counted(engine, "mocha_lag_seconds") > 0.2
    engine.open(live=False).close()  # a file would yield
    await first.settled()
    for _ in range(1000):
        if engine.lag_s == 0:  # nothing is left to do
            break
        await asyncio.sleep(0.01)
    engine.open(live=True).close()
    first.close()
    engine.stop()


async def test_who_keeps_up_is_never_late_however_long_it_speaks_and_pauses(
    lively: Recognizer, monkeypatch: pytest.MonkeyPatch
):
    now, lags = 100.0, list[float]()

    class Timed(Recognizer):
        def step(
            self, samples: Tensor, num_valid: Tensor, state: RecognizerState
        ) -> tuple[list[list[Emission]], RecognizerState]:
            lags.append(engine.lag_s)
            return super().step(samples, num_valid, state)

    engine = Engine(Timed(lively.model, lively.tokenizer), Limits(capacity=1))
    engine.start()
    lags.clear()
    clock = SimpleNamespace(monotonic=lambda: now, perf_counter=time.perf_counter)
    monkeypatch.setattr("mocha_server.engine.time", clock)
    stream = engine.open(live=True)
    for block in range(20):
        now += BLOCK / 16_000 + (7 if block == 10 else 0)
        await stream.write(np.zeros(BLOCK, np.float32))
        await stream.settled()
    assert len(lags) == 20 and max(lags) < BLOCK / 16_000
    stream.close()
    engine.stop()


async def test_a_client_that_reads_nothing_loses_its_row_and_is_told(
    engine: Engine, clip: NDArray[np.int16], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("mocha_server.stream.MAX_UNREAD", 3)
    stream = engine.open(live=True)
    await asyncio.wait_for(stream.write(np.tile(clip, 20)), 60)
    assert stream.closed and engine.num_streams == 0
    with pytest.raises(EngineError, match="does not read") as told:
        await asyncio.wait_for(text(stream), 60)
    assert told.value.code is ErrorCode.TOO_SLOW


async def test_streams_that_send_nothing_are_in_no_step(engine: Engine, clip: NDArray[np.int16]):
    idle = [engine.open(live=True) for _ in range(5)]
    speaking = engine.open(live=True)
    for start in range(0, len(clip), BLOCK):
        await speaking.write(clip[start : start + BLOCK])
    await speaking.settled()
    assert counted(engine, "mocha_streams") == 6
    assert counted(engine, "mocha_step_rows_sum") == counted(engine, "mocha_step_rows_count") > 0
    for stream in (*idle, speaking):
        stream.close()


async def test_int16_and_float_in_turns_are_the_same_audio(engine: Engine, lively: Recognizer, clip: NDArray[np.int16]):
    samples = clip.astype(np.float32) / 32768
    stream = engine.open(live=True)
    feeder = asyncio.create_task(text(stream))
    for number, start in enumerate(range(0, len(clip), 700)):
        await stream.write((clip if number % 2 else samples)[start : start + 700])
    stream.finish()
    assert await feeder == text_of(lively.transcribe(torch.from_numpy(samples)))


async def test_a_row_given_back_in_the_middle_begins_anew(engine: Engine, lively: Recognizer, clip: NDArray[np.int16]):
    expected = text_of(lively.transcribe(torch.from_numpy(clip.astype(np.float32) / 32768)))
    for _ in range(3):
        left = [engine.open(live=True) for _ in range(8)]  # all rows
        for stream in left:
            await stream.write(clip[: 5 * BLOCK])
        for stream in left:
            stream.close()
        came = [engine.open(live=True) for _ in range(8)]
        heard = [asyncio.create_task(text(stream)) for stream in came]
        for start in range(0, len(clip), BLOCK):
            for stream in came:
                await stream.write(clip[start : start + BLOCK])
        for stream in came:
            stream.finish()
        assert await asyncio.gather(*heard) == [expected] * 8


async def test_a_fast_sender_waits_for_room(engine: Engine, clip: NDArray[np.int16]):
    stream = engine.open(live=True)
    heard = asyncio.create_task(text(stream))
    most = 0
    for _ in range(5):
        await stream.write(clip)
        most = max(most, stream.place.buffered)
    assert most <= 2 * engine.max_buffer
    stream.finish()
    await heard


@pytest.mark.parametrize(("block_ms", "max_buffer_s"), [(80, 0.001), (1000, 0.5)])
async def test_a_buffer_holds_a_block_at_least(
    lively: Recognizer, clip: NDArray[np.int16], block_ms: int, max_buffer_s: float
):
    engine = Engine(lively, Limits(capacity=2, block_ms=block_ms, max_buffer_s=max_buffer_s))
    engine.start()
    stream = engine.open(live=True)
    await asyncio.wait_for(stream.write(clip), 60)
    stream.finish()
    assert await text(stream) == text_of(lively.transcribe(torch.from_numpy(clip / np.float32(32768))))
    engine.stop()


async def test_who_is_refused_is_told_which_places_are_taken(lively: Recognizer):
    for rows, reason in ((None, "all 2 streams of this server"), (1, "all 1 such streams of a worker")):
        engine = Engine(lively, Limits(capacity=2, rows=rows))
        for _ in range(rows or 2):
            engine.open(live=True)
        with pytest.raises(EngineError, match=reason):
            engine.open(live=True)


def test_an_engine_that_cannot_begin_says_why(lively: Recognizer, monkeypatch: pytest.MonkeyPatch):
    engine = Engine(lively, Limits(capacity=2))
    assert not engine.is_running

    def fail(*parts: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr("mocha_server.engine.warm_up", fail)
    with pytest.raises(MemoryError, match="no room"):
        engine.start()
    assert not engine.is_running


async def test_an_engine_that_stops_ends_its_streams(lively: Recognizer, clip: NDArray[np.int16]):
    engine = Engine(lively, Limits(capacity=2, max_buffer_s=0.1))
    engine.start()
    assert engine.is_running
    stream = engine.open(live=True)
    writing = asyncio.create_task(stream.write(np.tile(clip, 200)))  # waits for room most of the time
    await asyncio.sleep(0.05)
    await asyncio.to_thread(engine.stop)
    await asyncio.wait_for(writing, 10)
    with pytest.raises(EngineError, match="the server stops"):
        await text(stream)
    assert not engine.is_running
    with pytest.raises(EngineError, match="the server stops"):
        engine.open(live=True)


async def test_batches_of_every_size_and_their_padding_change_no_text(
    engine: Engine, lively: Recognizer, clip: NDArray[np.int16]
):
    expected = text_of(lively.transcribe(torch.from_numpy(clip.astype(np.float32) / 32768)))
    for count in (3, 5, 7):
        streams = [engine.open(live=True) for _ in range(count)]
        heard = [asyncio.create_task(text(stream)) for stream in streams]
        for start in range(0, len(clip), 2 * BLOCK):
            for stream in streams:
                await stream.write(clip[start : start + 2 * BLOCK])
        for stream in streams:
            stream.finish()
        assert await asyncio.gather(*heard) == [expected] * count
