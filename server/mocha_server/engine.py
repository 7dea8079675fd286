"""One thread that owns the model and the state of every stream; asyncio on one side, batched tensors on the other.

Audio goes in through bounded buffers, emissions come back grouped per tick. Knows no wire protocol.
"""

import asyncio
import logging
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from mocha_model.phrases import PhraseBook
from mocha_model.recognizer import Recognizer
from mocha_model.streaming import first_rows, gather_rows, scatter_rows
from mocha_server.audio import Samples
from mocha_server.buffers import stack, take_front
from mocha_server.messages import ErrorCode
from mocha_server.metrics import Metrics
from mocha_server.scheduler import Candidate, Scheduler, Work
from mocha_server.stream import EngineError, Item, Stream
from mocha_server.transcript import ModelInfo
from mocha_server.warming import warm_up

log = logging.getLogger(__name__)
MAX_ROWS = 256  # of a step: more rows cost as much each, and delay the first
ENOUGH_ROWS = 64  # ready streams for which a step begins at once: more would hardly make it cheaper for each
LARGEST_S = 0.64  # of audio that a step takes of one stream
TICK_S = 0.02  # otherwise a step waits so long for company, so that few streams cost little
BACKGROUND_PRIORITY = 10  # niceness
LAG_MEMORY = 0.9  # how much of the measured lag each step keeps


def model_info(recognizer: Recognizer) -> ModelInfo:
    """What the outside needs to know of `recognizer`."""
    r = recognizer
    sizes = (r.sample_rate, r.frame_samples, r.latency_samples, r.chunk_width)
    read = (r.patience_samples, r.least_evidence, r.look_ahead_samples, r.settles)
    return ModelInfo(r.name, *sizes, r.pause_frames, r.calibration, r.file_calibration, *read)


@dataclass(frozen=True)
class Limits:
    """What an engine takes on.

    Attributes:
        capacity: streams at once, in all processes together.
        block_ms: audio that a live stream gathers before a step, rounded to whole frames.
        max_buffer_s: audio waiting per stream, a block at least; then the sender is paced.
        max_lag_s: no live stream is admitted while live audio waits longer than this; files, which yield, are.
        rows: streams at once in this process, if fewer than `capacity`.

    """

    capacity: int
    block_ms: float = 80
    max_buffer_s: float = 4.0
    max_lag_s: float = float("inf")
    rows: int | None = None


class Engine:
    """All streams of a process over one `Recognizer`."""

    def __init__(
        self, recognizer: Recognizer, limits: Limits, metrics: Metrics | None = None, background: bool = False
    ) -> None:
        """`metrics` also counts the streams of other processes, which share the capacity.

        An engine in the `background` leaves the processor to others where they need it.
        """
        rate, info, rows = recognizer.sample_rate, model_info(recognizer), limits.rows or limits.capacity
        self._recognizer, self.capacity, self.info = recognizer, limits.capacity, info
        self._max_lag_s = limits.max_lag_s
        head_start = max(0, info.frame_samples - info.latency_samples)
        block = max(1, round(rate * limits.block_ms / 1000 / info.frame_samples)) * info.frame_samples
        self.max_buffer = max(int(limits.max_buffer_s * rate), block)  # with less, no step would ever be due
        self._scheduler = Scheduler(block, max(int(rate * LARGEST_S), block), min(rows, MAX_ROWS), head_start)
        self._pool, self._device = recognizer.init_state(rows), recognizer.model.features.mean.device
        self._free, self._rows = list(range(rows))[::-1], rows
        self._streams: dict[int, Stream] = {}
        self._ready: dict[int, Candidate] = {}  # streams with something to do
        self._forgotten: list[int] = []  # roots of phrases that no stream uses after the step at hand
        self._lock, self._background = threading.Condition(), background
        self._stopping, self._idle, self._warm = False, False, threading.Event()
        self._broken: Exception | None = None  # why it could not begin
        self.lag_s = 0.0  # by which live audio was late in the steps of late; decays
        self.metrics = metrics or Metrics()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin to serve, once steps on silence have claimed the memory and made the kernels that all others need.

        Raises what these steps raise.
        """
        self._thread.start()
        self._warm.wait()
        if self._broken is not None:
            raise self._broken

    def stop(self) -> None:
        """Finish the step at hand and end the thread; open streams get an error."""
        with self._lock:
            self._stopping = True
            self._lock.notify()
        self._thread.join()

    @property
    def is_running(self) -> bool:
        """Whether streams are served."""
        return self._thread.is_alive() and not self._stopping

    @property
    def num_streams(self) -> int:
        """Streams open now."""
        return len(self._streams)

    def open(self, live: bool) -> Stream:
        """A stream with a fresh row; raises EngineError when the server has no row or no time left."""
        with self._lock:
            full = self.metrics.streams >= self.capacity
            if not self._free or self._stopping or full:
                self.metrics.refuse()
                those = f"{self.capacity} streams of this server" if full else f"{self._rows} such streams of a worker"
                why = "the server stops" if self._stopping else f"all {those} are in use"
                raise EngineError(ErrorCode.SERVER_FULL, why)
            if live and self.lag_s > self._max_lag_s:
                self.metrics.refuse()
                late = f"with {len(self._streams)} streams it is {1000 * self.lag_s:.0f} ms late"
                raise EngineError(ErrorCode.SERVER_FULL, f"the server is at its capacity: {late}")
            row = self._free.pop()
            stream = Stream(self, row, Candidate(row, live, fresh=True), asyncio.get_running_loop())
            self._streams[row] = stream
            self.metrics.set_streams(len(self._streams))
        return stream

    def add(self, stream: Stream, samples: Samples) -> None:
        """Buffer samples; use `Stream.write`, which waits for room."""
        with self._lock:
            place = stream.place
            if stream.closed or place.ending or not len(samples):
                return
            self._set_due(stream)
            stream.blocks.append(samples)
            place.buffered += len(samples)
            self._see(place)

    def end(self, stream: Stream, restarting: bool = False) -> None:
        """See `Stream.finish` and `Stream.flush`."""
        with self._lock:
            if not stream.closed:
                self._set_due(stream)
                stream.place.ending, stream.restarting = True, restarting
                self._see(stream.place)

    def has_work(self, stream: Stream) -> bool:
        """Whether the next steps would take something of `stream`."""
        with self._lock:
            return self._scheduler.is_ready(stream.place)

    @property
    def phrases(self) -> PhraseBook | None:
        """Where the phrases of all streams are, if they may have any."""
        return self._recognizer.phrases

    def favour(self, stream: Stream, phrases: Sequence[str]) -> None:
        """See `Stream.favour`; in any thread, and may take seconds."""
        if self.phrases is None:
            return
        root = self.phrases.add(phrases)
        with self._lock:
            if stream.closed:
                self._forget([root])
            else:
                stream.old_phrases.append(stream.phrases)
                stream.phrases = root

    def release(self, stream: Stream) -> None:
        """See `Stream.close`; twice is the same as once."""
        with self._lock:
            if not stream.closed:
                stream.closed = True
                stream.blocks.clear()
                self._ready.pop(stream.row, None)
                self._forget([stream.phrases, *stream.old_phrases])
                del self._streams[stream.row]
                self._free.append(stream.row)
                self.metrics.set_streams(len(self._streams))

    def _see(self, place: Candidate) -> None:
        """Note whether a stream has something to do, and wake the thread if it had nothing; the lock is held."""
        if self._scheduler.is_ready(place):
            self._ready[place.key] = place
            if self._idle:
                self._idle = False
                self._lock.notify()
        else:
            self._ready.pop(place.key, None)

    def _set_due(self, stream: Stream) -> None:
        """The oldest audio is due when it would have been spoken, had the client not paused; the lock is held."""
        place, rate = stream.place, self.info.sample_rate
        if place.key not in self._ready:
            stream.began = max(stream.began, time.monotonic() - (stream.num_taken + place.buffered) / rate)
        place.due = stream.began + stream.num_taken / rate

    def _run(self) -> None:
        if self._background:
            with suppress(OSError):  # a system where threads have no priority of their own
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), BACKGROUND_PRIORITY)
        try:
            warm_up(self._recognizer, self._scheduler)
        except Exception as error:
            self._broken = error
            return
        finally:
            self._warm.set()
        try:
            while (taken := self._wait()) is not None:
                self._try_step(taken)
        finally:
            with self._lock:
                self._stopping = True
            self._give_up(list(self._streams.values()), "the server stops")

    def _try_step(self, taken: list[tuple[Stream, Work, Samples]]) -> None:
        """A step. If the model fails for these rows, they end and the server goes on."""
        try:
            self._step(taken)
        except Exception:
            log.exception("a step of %d streams failed", len(taken))
            self._give_up([stream for stream, _, _ in taken], "the recogniser failed on this audio")

    def _give_up(self, streams: list[Stream], why: str) -> None:
        """End `streams` with an error; called in the thread."""
        for stream in streams:
            self.release(stream)
        self._post([(stream, [EngineError(ErrorCode.INTERNAL, why)]) for stream in streams])

    def _wait(self) -> list[tuple[Stream, Work, Samples]] | None:
        """The next batch with its audio, as soon as there is one; None to stop."""
        with self._lock:
            self._forget_phrases()
            while not self._stopping:
                if not self._ready:
                    self._idle = True
                    self._set_lag(0.0)
                    self._lock.wait()
                elif len(self._ready) < min(ENOUGH_ROWS, len(self._streams)) and not self._has_backlog():
                    self._lock.wait(TICK_S)
                works = self._scheduler.choose(self._ready.values(), time.monotonic())
                if works and not self._stopping:
                    batch = [(self._streams[work.key], work) for work in works]
                    self._measure_lag([stream for stream, _ in batch])
                    return [(stream, work, self._take(stream, work)) for stream, work in batch]
            return None

    def _has_backlog(self) -> bool:
        """Whether a step is due that others could only make later; the lock is held."""
        return any(place.buffered >= self._scheduler.largest for place in self._ready.values())

    def _forget(self, roots: list[int]) -> None:
        """What phrases have as `roots` is no stream's any more; the lock is held."""
        self._forgotten += roots
        if self._idle:
            self._forget_phrases()

    def _forget_phrases(self) -> None:
        """Between two steps, when no row uses them; the lock is held."""
        forgotten, self._forgotten = self._forgotten, []
        for root in forgotten:
            if self.phrases is not None:
                self.phrases.remove(root)

    def _measure_lag(self, streams: list[Stream]) -> None:
        """How late the audio is that is taken now."""
        late = time.monotonic() - min((s.place.due for s in streams if s.place.live), default=float("inf"))
        self._set_lag(max(late, self.lag_s * LAG_MEMORY))

    def _set_lag(self, lag_s: float) -> None:
        self.lag_s = lag_s
        self.metrics.set_lag(lag_s)

    def _take(self, stream: Stream, work: Work) -> Samples:
        """Remove what `work` takes from the front of a stream's buffer; the lock is held."""
        place = stream.place
        samples = take_front(stream.blocks, work.num_samples)
        place.buffered -= work.num_samples
        place.fresh = False
        stream.steps_begun += 1
        stream.num_taken += work.num_samples
        self._set_due(stream)
        if work.fresh:
            self._forgotten += stream.old_phrases
            stream.old_phrases.clear()
        if work.flush:
            del self._ready[place.key]
        else:
            self._see(place)
        return samples

    @torch.inference_mode()
    def _step(self, taken: list[tuple[Stream, Work, Samples]]) -> None:
        began = time.perf_counter()
        works = [work for _, work, _ in taken]
        device, num_rows = self._device, self._scheduler.padded(works)
        # What pads the batch goes on from the state of the first row, like the others, and is thrown away.
        filler = [taken[0]] * (num_rows - len(works))
        every = torch.tensor([stream.row for stream, _, _ in taken + filler], device=device)
        num_samples = torch.tensor([work.num_samples for _, work, _ in taken + filler], device=device)
        samples = torch.from_numpy(stack([part for _, _, part in taken], num_rows)).to(device)
        rows = every[: len(works)]
        fresh = torch.tensor([work.fresh for work in works], device=device)
        if fresh.any():
            beginning = [stream for stream, work, _ in taken if work.fresh]
            roots = torch.tensor([stream.phrases for stream in beginning], device=device)
            pause = torch.tensor([stream.pause or self._recognizer.pause_frames for stream in beginning], device=device)
            scatter_rows(self._pool, rows[fresh], self._recognizer.init_state(len(roots), roots, pause))
        emissions, state = self._recognizer.step(samples, num_samples, gather_rows(self._pool, every))
        if works[0].flush:  # then all of them
            rest, state = self._recognizer.flush(state, torch.ones(num_rows, dtype=torch.bool, device=device))
            emissions = [first + more for first, more in zip(emissions, rest, strict=True)]
        if not works[0].flush:  # after which a row is fresh
            # A row whose stream was closed meanwhile may be another's already: that one is fresh and resets it.
            scatter_rows(self._pool, rows, first_rows(state, len(works)))
        events: list[tuple[Stream, list[Item]]] = []
        for (stream, work, _), found in zip(taken, emissions, strict=False):
            if work.flush:
                self._after_flush(stream)
            events.append((stream, [*([found] if found else []), *([None] if work.flush else [])]))
        heard_s = sum(work.num_samples for work in works) / self.info.sample_rate
        self.metrics.observe(heard_s, len(taken), time.perf_counter() - began)
        self._post(events)

    def _after_flush(self, stream: Stream) -> None:
        """Give the row back, or let its next step begin anew."""
        with self._lock:
            if not stream.restarting:
                self.release(stream)
            elif not stream.closed:
                place = stream.place
                place.ending, stream.restarting, place.fresh = False, False, True
                self._see(place)

    def _post(self, events: list[tuple[Stream, list[Item]]]) -> None:
        """Hand events over to the loops, one call for each loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Stream, list[Item]]]] = {}
        for stream, items in events:
            by_loop.setdefault(stream.loop, []).append((stream, items))
        for loop, deliveries in by_loop.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_deliver_all, deliveries)


def _deliver_all(deliveries: list[tuple[Stream, list[Item]]]) -> None:
    for stream, items in deliveries:
        stream.deliver(items)
