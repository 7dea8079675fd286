"""What clients send on its way to their sessions: raw audio in pieces, containers decoded as they arrive.

Knows no wire protocol; a session is told of samples that it takes as they are, wherever they come from.
"""

from collections.abc import AsyncGenerator, Iterator
from typing import TypeVar

from mocha_server.decoding import ArrivingDecoder
from mocha_server.messages import Encoding, Finish, Start

PIECE_BYTES = 1 << 15  # of a message at a time, so that a large one holds up nobody else
Message = TypeVar("Message")


def cut(audio: bytes) -> Iterator[bytes]:
    """A message of audio in pieces, one at least; between them others have their turn."""
    return (audio[at : at + PIECE_BYTES] for at in range(0, max(1, len(audio)), PIECE_BYTES))


class Incoming:
    """The audio of a connection, for one session or for several that follow each other."""

    def __init__(self, to_rate: int) -> None:
        """`to_rate` of the samples that come of a container."""
        self._to_rate = to_rate
        self._container: ArrivingDecoder | None = None

    def started(self, start: Start) -> Start:
        """What the session is told instead of the client's `start`; a container goes on where it is."""
        if start.encoding is not Encoding.CONTAINER:
            return start
        self._container = self._container or ArrivingDecoder(self._to_rate)
        raw = {"encoding": Encoding.PCM_F32LE, "sample_rate": self._to_rate, "channels": 1}
        return start.model_copy(update=raw)

    async def given(self, message: Message) -> AsyncGenerator[Message | bytes, None]:
        """What the session is given for a message of the client, one after another.

        Of a container, `Finish` is what ends it. Raises AudioError, or EngineError where it cannot be decoded.
        """
        if isinstance(message, bytes):
            for piece in cut(message):
                if self._container is None:
                    yield piece
                    continue
                async for samples in self._container.push(piece):
                    yield samples
            return
        if isinstance(message, Finish) and self._container:
            async for samples in self._container.finish():
                yield samples
            self._container = None  # what follows is told that it must not
        yield message

    def close(self) -> None:
        """No more is wanted of it."""
        if self._container:
            self._container.close()
