"""A stream as the protocols see it: audio goes in through a bounded buffer, groups of emissions come out.

Lives in the event loop that opened it; what the engine's thread does with it is in `engine`. Knows no wire protocol.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mocha_model.emissions import Emission
from mocha_server.audio import Samples
from mocha_server.messages import ErrorCode
from mocha_server.scheduler import Candidate

if TYPE_CHECKING:
    from mocha_server.engine import Engine

MAX_UNREAD = 2_000  # event groups a client may leave unread before it counts as too slow
PHRASE_READERS = ThreadPoolExecutor(2)  # of their own: hundreds of phrases take seconds, and uploads decode meanwhile


class EngineError(RuntimeError):
    """A stream that cannot go on; `code` says why, for programs."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


Item = list[Emission] | EngineError | None  # what a stream's reader gets: emissions, why it cannot go on, or its end


@dataclass(eq=False)
class Stream:
    """A stream's place in the engine. Its methods belong to the event loop that opened it."""

    engine: "Engine"
    row: int
    place: Candidate
    loop: asyncio.AbstractEventLoop
    blocks: deque[Samples] = field(default_factory=deque)
    phrases: int = 0  # root of what this stream favours, in the recogniser's book
    pause: int = 0  # frames without a character that end a segment, from the next beginning; 0 for the recogniser's own
    old_phrases: list[int] = field(default_factory=list)  # roots it may use until it begins anew
    began: float = 0.0  # when its first audio came; moved on by what the client paused
    num_taken: int = 0  # samples the model has had
    restarting: bool = False  # after the flush that is due, the row begins anew instead of being given back
    closed: bool = False
    steps_begun: int = 0
    steps_delivered: int = 0
    _events: "asyncio.Queue[Item]" = field(default_factory=asyncio.Queue)
    _room: asyncio.Event = field(default_factory=asyncio.Event)

    async def write(self, samples: Samples) -> None:
        """Add samples [N]; waits while the buffer is full, so a fast sender is paced, not stored."""
        step = self.engine.max_buffer
        for start in range(0, len(samples), step):
            while (self.restarting or self.place.buffered >= self.engine.max_buffer) and not self.closed:
                self._room.clear()
                await self._room.wait()
            if self.closed:
                return
            self.engine.add(self, samples[start : start + step])

    async def favour(self, phrases: Sequence[str]) -> None:
        """Favour these phrases, and no others, from the next beginning: the first audio, or what follows a flush."""
        await asyncio.get_running_loop().run_in_executor(PHRASE_READERS, self.engine.favour, self, phrases)

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
        self._room.set()

    async def events(self) -> AsyncIterator[list[Emission]]:
        """Groups of emissions until the stream has flushed; raises EngineError if it cannot go on."""
        while (item := await self._events.get()) is not None:
            if isinstance(item, EngineError):
                raise item
            yield item

    def deliver(self, items: list[Item]) -> None:
        """Called in the event loop by the engine, once for each step the stream was in."""
        self.steps_delivered += 1
        self._room.set()
        if self._events.qsize() + len(items) > MAX_UNREAD:
            self.close()
            items = [EngineError(ErrorCode.TOO_SLOW, "the client does not read what is sent to it")]
        for item in items:
            self._events.put_nowait(item)
