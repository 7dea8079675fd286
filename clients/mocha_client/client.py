"""`StreamingClient`: audio in, typed events out, over the native protocol. Async at heart, with a plain wrapper.

async with StreamingClient("ws://localhost:8000/v1/stream", sample_rate=16000) as client:
    await client.send(pcm_bytes)
    await client.finish()
    async for event in client:
        ...
"""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Iterable
from types import TracebackType

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidURI

from mocha_server.messages import (
    Encoding,
    End,
    Error,
    ErrorCode,
    Finish,
    Ready,
    Segment,
    Start,
    Text,
    server_messages,
)

DEFAULT_URL = "ws://localhost:8000/v1/stream"
Event = Text | Segment | End


class ClientError(RuntimeError):
    """The stream cannot go on; `code` is the server's, or None where the server was not reached."""

    def __init__(self, message: str, code: ErrorCode | None = None) -> None:
        super().__init__(message)
        self.code = code


class StreamingClient:
    """One stream. Enter it, `send` bytes of any size, `finish`, and iterate over events until `End`."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        sample_rate: int = 16_000,
        encoding: Encoding = Encoding.PCM_S16LE,
        channels: int = 1,
    ) -> None:
        """Describe the audio that `send` will be given: interleaved `channels` at `sample_rate` Hz."""
        self.url = url
        self._start = Start(sample_rate=sample_rate, encoding=encoding, channels=channels)
        self._socket: ClientConnection | None = None
        self.ready: Ready | None = None
        self.warnings: list[Error] = []

    async def __aenter__(self) -> "StreamingClient":
        """Connect and wait until the server admits the stream; raises ClientError."""
        try:
            # A server that paces us reads our pings, and answers them, behind the audio before them: that may be long.
            self._socket = await connect(self.url, max_size=2**24, ping_timeout=None)
        except (OSError, InvalidHandshake, InvalidURI, TimeoutError) as error:
            raise ClientError(f"no mocha-asr server answers at {self.url} ({error})") from error
        await self._open.send(self._start.model_dump_json())
        first = await self._receive()
        if not isinstance(first, Ready):
            raise ClientError("the server did not begin with a ready message")
        self.ready = first
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the connection, finished or not."""
        await self._open.close()

    async def send(self, audio: bytes) -> None:
        """Send audio, cut anywhere; waits while the server is behind. If it has closed, iteration says why."""
        try:
            await self._open.send(audio)
        except ConnectionClosed as error:
            raise ClientError("the server has closed the stream") from error

    async def finish(self) -> None:
        """No more audio: the server emits the rest, then `End`."""
        try:
            await self._open.send(Finish().model_dump_json())
        except ConnectionClosed as error:
            raise ClientError("the server has closed the stream") from error

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Events until `End`, which is the last; raises ClientError for an error of the server."""
        while True:
            message = await self._receive()
            if isinstance(message, Ready):
                continue
            yield message
            if isinstance(message, End):
                return

    async def transcribe(self, pieces: AsyncIterable[bytes]) -> AsyncIterator[Event]:
        """Send `pieces`, finish, and give events meanwhile. What `pieces` raises is raised here."""
        broken: list[Exception] = []

        async def feed() -> None:
            try:
                async for piece in pieces:
                    await self.send(piece)
                await self.finish()
            except ClientError:
                return  # the server closed the stream; the events below say why
            except Exception as error:
                broken.append(error)
                await self._open.close()

        feeder = asyncio.create_task(feed())
        try:
            async for event in self:
                yield event
        except ClientError:
            if broken:
                raise broken[0] from None
            raise
        finally:
            feeder.cancel()
            await asyncio.gather(feeder, return_exceptions=True)

    @property
    def _open(self) -> ClientConnection:
        if self._socket is None:
            raise ClientError("the client is used outside its `async with` block")
        return self._socket

    async def _receive(self) -> Ready | Text | Segment | End:
        while True:
            try:
                message = server_messages.validate_json(await self._open.recv())
            except ConnectionClosed as error:
                raise ClientError("the connection was lost before the end of the stream") from error
            if not isinstance(message, Error):
                return message
            if message.fatal:
                raise ClientError(message.message, message.code)
            self.warnings.append(message)


def transcribe_stream(
    pieces: Iterable[bytes],
    url: str = DEFAULT_URL,
    sample_rate: int = 16_000,
    encoding: Encoding = Encoding.PCM_S16LE,
    channels: int = 1,
) -> list[Event]:
    """Send all `pieces` and return all events: the plain, blocking form. Raises ClientError."""

    async def given() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    async def run() -> list[Event]:
        async with StreamingClient(url, sample_rate, encoding, channels) as client:
            return [event async for event in client.transcribe(given())]

    return asyncio.run(run())
