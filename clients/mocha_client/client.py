"""`StreamingClient`: audio in, typed events out, over the native protocol. Async at heart, with a plain wrapper.

async with StreamingClient("ws://localhost:8000/v1/stream", sample_rate=16000) as client:
    await client.send(pcm_bytes)
    await client.finish()
    async for event in client:
        ...

A lost connection is replaced by a new one; `continuity` says what that means for audio and text.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

from pydantic import ValidationError
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from mocha_client.connection import CLOSE_S, DEFAULT_URL, ClientError, KeyRefused, authorization, connected, endpoint
from mocha_client.continuity import Continuity, Reconnected
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

__all__ = ["DEFAULT_URL", "ClientError", "Event", "StreamingClient", "endpoint", "transcribe_stream"]

Event = Text | Segment | End | Reconnected
PIECE_BYTES = 1 << 16  # of audio in one message; servers refuse messages without bound
PASSING = (ErrorCode.SERVER_FULL, ErrorCode.INTERNAL)  # errors after which a new connection may succeed
FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 5.0  # between attempts to connect again; doubled each time
STOOD_S = 5.0  # a connection lost after so long is a loss of its own, not one attempt more
SILENT_S = 60.0  # after `finish`, a connection that brings nothing for so long is lost; doubled each time


class StreamingClient:
    """One stream. Enter it, `send` bytes of any size, `finish`, and iterate over events until `End`.

    If the connection breaks, `send` and the iteration wait while it is restored, and the iteration gives the segment
    that was open, then `Reconnected`. One task may send while another iterates.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        sample_rate: int = 16_000,
        encoding: Encoding = Encoding.PCM_S16LE,
        channels: int = 1,
        phrases: Sequence[str] = (),
        reconnect_s: float = 30.0,
        keep_s: float = 300.0,
        patient: bool | None = None,
        api_key: str | None = None,
        pause_ms: int | None = None,
    ) -> None:
        """Describe the audio that `send` will be given: interleaved `channels` at `sample_rate` Hz.

        `url`: the server's native endpoint, or where its page is.
        `phrases`: words that this stream is likely to have, such as names; they are favoured.
        `reconnect_s`: how long to try to replace a lost connection; 0 never tries.
        `keep_s`: audio kept for a new connection, at most.
        `patient`: whether the server is to search for a while before it emits a character: far fewer errors, a
        tenth of a second later; None leaves it to the server.
        `api_key`: of a server that wants one.
        `pause_ms`: silence that ends a segment, 200 to 10,000; None for the model's own.

        Raises ValueError for audio in a container: a new connection could not begin in the middle of it.
        """
        if encoding is Encoding.CONTAINER:
            raise ValueError("audio in a container has to be decoded first, as `mocha_client.sources` does")
        self.url = endpoint(url)
        self._headers = authorization(api_key)
        self._start = Start(
            sample_rate=sample_rate,
            encoding=encoding,
            channels=channels,
            phrases=tuple(phrases),
            patient=patient,
            pause_ms=pause_ms,
        )
        self._reconnect_s = reconnect_s
        self._socket: ClientConnection | None = None
        self._continuity = Continuity(self._start, keep_s)
        self._events = deque[Event]()  # received, or made of what was, and not yet given to the caller
        self._failure: ClientError | None = None
        self._finishing = self._ended = self._restoring = False
        self._deadline: float | None = None  # set while connections are lost without text in between
        self._stands_since: float | None = None  # a connection with which nothing is wrong
        self._calling = 0  # `send` and `finish` that are under way
        self._called = asyncio.Event()  # that there is one of them, or `_close`
        self._idle: ClientError | None = None  # the server's, raised unless somebody sends again
        self._silent_s = SILENT_S
        self._lock = asyncio.Lock()  # held by whoever receives or restores
        self.ready: Ready | None = None
        self.warnings: list[Error] = []

    async def __aenter__(self) -> "StreamingClient":
        """Connect and wait until the server admits the stream; raises ClientError."""
        self._socket = await self._connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the connection, finished or not."""
        await self._close("the client was closed")

    async def send(self, audio: bytes) -> None:
        """Send audio, cut anywhere; waits while the server is behind or away. Raises ClientError."""
        with self._call():
            for at in range(0, len(audio), PIECE_BYTES):
                if self._restoring:
                    await self._restore(self._open)
                piece = bytes(audio[at : at + PIECE_BYTES])
                self._continuity.sent(piece)
                await self._deliver(piece)

    async def finish(self) -> None:
        """No more audio: the server emits the rest, then `End`. Raises ClientError."""
        with self._call():
            self._finishing = True
            await self._deliver(Finish().model_dump_json())

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Events until `End`, which is the last; raises ClientError for an error of the server."""
        while True:
            async with self._lock:
                if not self._events:
                    await self._receive()
                event = self._events.popleft()
            yield event
            if isinstance(event, End):
                return

    async def transcribe(self, pieces: AsyncIterable[bytes]) -> AsyncIterator[Event]:
        """Send `pieces`, finish, and give events meanwhile. What `pieces` raises is raised here."""
        broken: list[BaseException] = []

        async def feed() -> None:
            try:
                async for piece in pieces:
                    await self.send(piece)
                await self.finish()
            except ClientError:
                return  # the server closed the stream; the events below say why
            except (Exception, asyncio.CancelledError) as error:
                if feeder.cancelling():  # below
                    raise
                broken.append(error)
                await self._close("the audio cannot be read")

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

    @contextmanager
    def _call(self) -> Iterator[None]:
        """Somebody sends, so that a stream that was idle goes on."""
        self._calling += 1
        self._called.set()
        try:
            yield
        finally:
            self._calling -= 1

    async def _close(self, why: str) -> None:
        self._failure = self._failure or ClientError(why)
        self._called.set()
        try:
            async with asyncio.timeout(CLOSE_S):  # its own `close_timeout` begins when there is room in the socket
                await self._open.close()
        except TimeoutError:
            self._open.transport.abort()

    async def _connect(self) -> ClientConnection:
        """A connection on which a session has begun; raises ClientError."""
        socket, self.ready = await connected(self.url, self._start, self._headers)
        self._stands_since = asyncio.get_running_loop().time()
        self._continuity.ready(self.ready)
        return socket

    def _check(self) -> None:
        if self._failure or self._ended:
            raise self._failure or ClientError("the stream has ended")

    async def _deliver(self, message: bytes | str) -> None:
        """Send `message`. If the connection is lost, what restores it also sends again all that must be."""
        self._check()
        socket = self._open
        try:
            await socket.send(message)
        except ConnectionClosed:
            await self._restore(socket)

    async def _receive(self) -> None:
        """Wait until there is an event."""
        while not self._events:
            self._check()
            finishing = self._finishing
            try:
                async with asyncio.timeout(self._silent_s):
                    self._take(await self._open.recv())
            except TimeoutError:
                if finishing:
                    self._silent_s *= 2  # the server may as well be slow
                    self._open.transport.abort()
            except ConnectionClosed:
                await self._reconnect()

    def _take(self, data: str | bytes) -> None:
        try:
            message = server_messages.validate_json(data)
        except ValidationError:
            self._fail(ClientError("the server sent what this client does not know"))
            return
        if isinstance(message, Error):
            if not message.fatal:
                self.warnings.append(message)
                return
            self._forget_old_losses()
            self._stands_since = None
            if message.code is ErrorCode.IDLE and self._reconnect_s:
                self._idle = ClientError(message.message, message.code)
                self._called.clear()
            elif message.code not in PASSING or not self._reconnect_s:
                self._fail(ClientError(message.message, message.code))
        elif not isinstance(message, Ready):
            self._events.append(self._continuity.received(message))
            self._ended = isinstance(message, End)
            self._deadline = None

    def _fail(self, error: ClientError) -> None:
        self._failure = error
        self._end_segment()

    def _end_segment(self) -> None:
        """What is open ends here."""
        if segment := self._continuity.lost():
            self._events.append(segment)

    async def _restore(self, lost: ClientConnection) -> None:
        """Wait until there is another connection than `lost`, made by another task or here."""
        async with self._lock:
            if self._socket is lost:
                await self._reconnect()
        if self._failure:
            raise self._failure

    async def _reconnect(self) -> None:
        """Replace a lost connection; the lock is held. Sets `_failure` where that cannot be."""
        self._restoring = True
        try:
            while True:
                await self._drain()
                if self._ended or self._failure:
                    return
                self._end_segment()
                await self._until_called()
                socket = await self._connect_again()
                try:
                    resumed = await self._resume(socket)
                except BaseException:  # whoever waited here was cancelled: what comes next would come after a gap
                    socket.transport.abort()
                    raise
                finally:
                    self._socket = socket  # no sooner: until then whoever sends finds the lost one, and waits
                if self._failure:  # the client was closed meanwhile, and closed the lost one
                    socket.transport.abort()
                if resumed:
                    return
        except ClientError as error:
            self._failure = self._failure or error
        finally:
            self._restoring = False

    async def _until_called(self) -> None:
        """A stream may be idle because its machine slept: wait until somebody sends again; raises ClientError."""
        if self._idle and not (self._calling or self._finishing):
            try:
                async with asyncio.timeout(self._reconnect_s):
                    await self._called.wait()
            except TimeoutError:
                raise self._idle from None
        if self._failure:
            raise self._failure
        self._idle = None

    def _forget_old_losses(self) -> None:
        """What is lost after it stood for long is not the loss before once more."""
        now = asyncio.get_running_loop().time()
        if self._stands_since is not None and now - self._stands_since > STOOD_S:
            self._deadline = None

    async def _connect_again(self) -> ClientConnection:
        """A new connection within `reconnect_s`; raises ClientError."""
        now = asyncio.get_running_loop().time
        self._forget_old_losses()
        if self._deadline is None:
            self._deadline = now() + self._reconnect_s
        pause, problem = FIRST_PAUSE_S, "the connection was lost before the end of the stream"
        while not self._failure and now() + pause < self._deadline:
            await asyncio.sleep(pause)
            try:
                return await self._connect()
            except ClientError as error:
                if isinstance(error, KeyRefused) or error.code not in (None, *PASSING):
                    raise
                problem, pause = f"the connection was lost; {error}", min(2 * pause, MAX_PAUSE_S)
        raise ClientError(problem)

    async def _drain(self) -> None:
        """What a lost connection had brought before it was lost."""
        try:
            while not self._ended and not self._failure:
                self._take(await self._open.recv())
        except ConnectionClosed:
            return

    async def _resume(self, socket: ClientConnection) -> bool:
        """Begin again on `socket` where text ended; False if that is lost too."""
        reconnected, position = self._continuity.resume()
        self._events.append(reconnected)
        try:
            while not self._failure and (piece := self._continuity.audio(position, PIECE_BYTES)):
                await socket.send(piece)
                position += len(piece)
            if self._finishing:
                await socket.send(Finish().model_dump_json())
        except ConnectionClosed:
            return False
        return True


def transcribe_stream(
    pieces: Iterable[bytes],
    url: str = DEFAULT_URL,
    sample_rate: int = 16_000,
    encoding: Encoding = Encoding.PCM_S16LE,
    channels: int = 1,
    phrases: Sequence[str] = (),
    patient: bool | None = None,
    api_key: str | None = None,
    pause_ms: int | None = None,
) -> list[Event]:
    """Send all `pieces` and return all events: the plain, blocking form. Raises ClientError."""

    async def given() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    async def run() -> list[Event]:
        audio = (sample_rate, encoding, channels, phrases)
        async with StreamingClient(url, *audio, patient=patient, api_key=api_key, pause_ms=pause_ms) as client:
            return [event async for event in client.transcribe(given())]

    return asyncio.run(run())
