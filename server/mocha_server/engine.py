"""One thread that owns the model and the state of every stream; asyncio on one side, batched tensors on the other.

Audio goes in through bounded buffers, emissions come back grouped per tick. Knows no wire protocol.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import numpy as np
import torch

from mocha_model.emissions import Emission
from mocha_model.recognizer import Recognizer
from mocha_model.streaming import gather_rows, scatter_rows
from mocha_server.audio import Samples
from mocha_server.messages import ErrorCode
from mocha_server.metrics import Metrics
from mocha_server.scheduler import Candidate, Scheduler, Work
from mocha_server.transcript import ModelInfo

log = logging.getLogger(__name__)
MAX_UNREAD = 2_000  # event groups a client may leave unread before it counts as too slow


class EngineError(RuntimeError):
    """A stream that cannot go on; `code` says why, for programs."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


def model_info(recognizer: Recognizer) -> ModelInfo:
    """What the outside needs to know of `recognizer`."""
    r = recognizer
    return ModelInfo(r.name, r.sample_rate, r.frame_samples, r.latency_samples, r.chunk_width)


@dataclass(eq=False)
class Stream:
    """A stream's place in the engine. Its methods belong to the event loop that opened it."""

    engine: "Engine"
    row: int
    live: bool
    loop: asyncio.AbstractEventLoop
    blocks: deque[Samples] = field(default_factory=deque)
    buffered: int = 0
    since: float = 0.0
    ending: bool = False
    restarting: bool = False  # after the flush that is due, the row begins anew instead of being given back
    closed: bool = False
    steps_begun: int = 0
    steps_delivered: int = 0
    _events: "asyncio.Queue[list[Emission] | EngineError | None]" = field(default_factory=asyncio.Queue)
    _room: asyncio.Event = field(default_factory=asyncio.Event)

    async def write(self, samples: Samples) -> None:
        """Add samples [N] float32; waits while the buffer is full, so a fast sender is paced, not stored."""
        step = self.engine.max_buffer
        for start in range(0, len(samples), step):
            while (self.restarting or self.buffered >= self.engine.max_buffer) and not self.closed:
                self._room.clear()
                await self._room.wait()
            if self.closed:
                return
            self.engine.add(self, samples[start : start + step])

    def finish(self) -> None:
        """No more audio: flush, then the iteration ends."""
        self.engine.end(self)

    def flush(self) -> None:
        """End the utterance: `events` ends as after `finish`, and a new call of it gives those of the next one.

        The row is kept, so that nobody else can take the place of a client between two utterances.
        """
        self.engine.end(self, restarting=True)

    async def settled(self) -> None:
        """Wait until what was written is recognised, but for less than a block, and its events are there."""
        while not self.closed and (self.engine.has_work(self) or self.steps_begun > self.steps_delivered):
            self._room.clear()
            await self._room.wait()

    def pending(self) -> list[Emission]:
        """Emissions there already, without waiting; raises EngineError if the stream cannot go on."""
        found: list[Emission] = []
        while not self._events.empty() and (item := self._events.get_nowait()) is not None:
            if isinstance(item, EngineError):
                raise item
            found += item
        return found

    def close(self) -> None:
        """Give the row back at once, whatever is still buffered."""
        self.engine.release(self)

    async def events(self) -> AsyncIterator[list[Emission]]:
        """Groups of emissions until the stream has flushed; raises EngineError if it cannot go on."""
        while (item := await self._events.get()) is not None:
            if isinstance(item, EngineError):
                raise item
            yield item

    def deliver(self, items: list[list[Emission] | EngineError | None]) -> None:
        """Called in the event loop by the engine, once for each step the stream was in."""
        self.steps_delivered += 1
        self._room.set()
        if self._events.qsize() + len(items) > MAX_UNREAD:
            self.close()
            items = [EngineError(ErrorCode.TOO_SLOW, "the client does not read what is sent to it")]
        for item in items:
            self._events.put_nowait(item)


class Engine:
    """All streams of a process over one `Recognizer`."""

    def __init__(
        self, recognizer: Recognizer, capacity: int, block_ms: int, max_buffer_s: float, metrics: Metrics | None = None
    ) -> None:
        rate = recognizer.sample_rate
        self._recognizer, self.capacity = recognizer, capacity
        self.info = model_info(recognizer)
        self.max_buffer = int(max_buffer_s * rate)
        self._scheduler = Scheduler(rate * block_ms // 1000, largest=rate // 2, max_rows=min(capacity, 256))
        self._pool = recognizer.init_state(capacity)
        self._free = list(range(capacity))[::-1]
        self._streams: dict[int, Stream] = {}
        self._lock = threading.Condition()
        self._stopping = False
        self.metrics = metrics or Metrics()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def stop(self) -> None:
        """Finish the step at hand and end the thread; open streams get an error."""
        with self._lock:
            self._stopping = True
            self._lock.notify()
        self._thread.join()

    @property
    def num_streams(self) -> int:
        """Streams open now."""
        return len(self._streams)

    def open(self, live: bool) -> Stream:
        """A stream with a fresh row; raises EngineError when full."""
        with self._lock:
            if not self._free or self._stopping:
                self.metrics.refused.inc()
                raise EngineError(ErrorCode.SERVER_FULL, f"all {self.capacity} streams of this server are in use")
            stream = Stream(self, self._free.pop(), live, asyncio.get_running_loop())
            row = torch.tensor([stream.row])
            with torch.inference_mode():
                scatter_rows(self._pool, row, self._recognizer.init_state(1))
            self._streams[stream.row] = stream
            self.metrics.streams.set(len(self._streams))
        return stream

    def add(self, stream: Stream, samples: Samples) -> None:
        """Buffer samples; use `Stream.write`, which waits for room."""
        with self._lock:
            if stream.closed or stream.ending or not len(samples):
                return
            if not stream.buffered:
                stream.since = time.monotonic()
            stream.blocks.append(samples)
            stream.buffered += len(samples)
            self._lock.notify()

    def end(self, stream: Stream, restarting: bool = False) -> None:
        """See `Stream.finish` and `Stream.flush`."""
        with self._lock:
            stream.ending, stream.restarting = True, restarting
            self._lock.notify()

    def has_work(self, stream: Stream) -> bool:
        """Whether the scheduler would put `stream` into a step."""
        return bool(self._scheduler.choose([_candidate(stream)]))

    def release(self, stream: Stream) -> None:
        """See `Stream.close`; twice is the same as once."""
        with self._lock:
            if not stream.closed:
                stream.closed = True
                stream._room.set()
                stream.blocks.clear()
                del self._streams[stream.row]
                self._free.append(stream.row)
                self.metrics.streams.set(len(self._streams))

    def _run(self) -> None:
        while True:
            with self._lock:
                batch = self._next_batch()
                while not batch and not self._stopping:
                    self._lock.wait()
                    batch = self._next_batch()
                if self._stopping:
                    self._post({s: [EngineError(ErrorCode.INTERNAL, "server stops")] for s in self._streams.values()})
                    return
                taken = [(stream, work, _take(stream, work.num_samples)) for stream, work in batch]
            try:
                self._step(taken)
            except Exception:  # the model failed for these rows: they end, the server goes on
                log.exception("a step of %d streams failed", len(taken))
                error = EngineError(ErrorCode.INTERNAL, "the recogniser failed on this audio")
                self._post({stream: [error] for stream, _, _ in taken})
                for stream, _, _ in taken:
                    self.release(stream)

    def _next_batch(self) -> list[tuple[Stream, Work]]:
        candidates = [_candidate(stream) for stream in self._streams.values()]
        return [(self._streams[w.key], w) for w in self._scheduler.choose(candidates)]

    @torch.inference_mode()
    def _step(self, taken: list[tuple[Stream, Work, Samples]]) -> None:
        began = time.perf_counter()
        rows = torch.tensor([stream.row for stream, _, _ in taken])
        num_samples = torch.tensor([work.num_samples for _, work, _ in taken])
        samples = torch.zeros(len(taken), int(num_samples.max()))
        for into, (_, _, part) in zip(samples, taken, strict=True):
            into[: len(part)] = torch.from_numpy(part)
        state = gather_rows(self._pool, rows)
        emissions, state = self._recognizer.step(samples, num_samples, state)
        ends = torch.tensor([work.flush for _, work, _ in taken])
        if ends.any():
            rest, state = self._recognizer.flush(state, ends)
            emissions = [first + more for first, more in zip(emissions, rest, strict=True)]
        with self._lock:  # a row whose stream was closed meanwhile may belong to another one already
            held = torch.tensor([not stream.closed for stream, _, _ in taken])
            scatter_rows(self._pool, rows[held], gather_rows(state, held.nonzero()[:, 0]))
            flushed = [stream for stream, work, _ in taken if work.flush]
            ended = [stream for stream in flushed if not stream.restarting]
            self._restart([stream for stream in flushed if stream.restarting])
        events: dict[Stream, list[list[Emission] | EngineError | None]] = {}
        for (stream, work, _), found in zip(taken, emissions, strict=True):
            events[stream] = ([found] if found else []) + ([None] if work.flush else [])
        for stream in ended:
            self.release(stream)
        self.metrics.observe(float(num_samples.sum()) / self.info.sample_rate, len(taken), time.perf_counter() - began)
        self._post(events)

    def _restart(self, streams: list[Stream]) -> None:
        """Fresh state for the rows of flushed streams that go on; the lock is held."""
        for stream in streams:
            stream.ending = stream.restarting = False
        rows = torch.tensor([stream.row for stream in streams if not stream.closed], dtype=torch.long)
        if len(rows):
            scatter_rows(self._pool, rows, self._recognizer.init_state(len(rows)))

    def _post(self, events: dict[Stream, list[list[Emission] | EngineError | None]]) -> None:
        """Hand events over to the loops, one call for each loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Stream, list[list[Emission] | EngineError | None]]]] = {}
        for stream, items in events.items():
            by_loop.setdefault(stream.loop, []).append((stream, items))
        for loop, deliveries in by_loop.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_deliver_all, deliveries)


def _deliver_all(deliveries: list[tuple[Stream, list[list[Emission] | EngineError | None]]]) -> None:
    for stream, items in deliveries:
        stream.deliver(items)


def _candidate(stream: Stream) -> Candidate:
    return Candidate(stream.row, stream.buffered, stream.since, stream.live, stream.ending)


def _take(stream: Stream, num_samples: int) -> Samples:
    """Remove `num_samples` from the front of a stream's buffer, for a step."""
    stream.steps_begun += 1
    parts, missing = [], num_samples
    while missing:
        block = stream.blocks.popleft()
        if len(block) > missing:
            stream.blocks.appendleft(block[missing:])
            block = block[:missing]
        parts.append(block)
        missing -= len(block)
    stream.buffered -= num_samples
    stream.since = time.monotonic()
    return np.concatenate(parts) if parts else np.zeros(0, np.float32)
