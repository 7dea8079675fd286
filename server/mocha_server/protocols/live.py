"""What adapters of live protocols share: utterances over one engine stream, and the loop that moves messages.

An adapter is a `Translator` (what a client's message asks for, how native messages look on its wire) and a
`Transport` (how they travel). Neither knows the engine; nothing here knows a wire format.
"""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Generic, Protocol, TypeVar

from fastapi import WebSocket, WebSocketDisconnect

from mocha_server.audio import AudioError
from mocha_server.incoming import Incoming
from mocha_server.live_engines import LiveEngines
from mocha_server.messages import End, Error, ErrorCode, Finish, Segment, Start
from mocha_server.session import Session
from mocha_server.stream import EngineError, Stream
from mocha_server.transcript import SpokenText

log = logging.getLogger(__name__)
SLOW_S = 20.0  # a client that does not read for so long is given up
LEFT = "mocha.left"  # among the extensions of a WebSocket's scope once its client has left: see `serving`
KEY_SUBPROTOCOLS = ("bearer", "token")  # the one before a key, where a client cannot set headers
CLOSE_CODES = {ErrorCode.SERVER_FULL: 1013, ErrorCode.INTERNAL: 1011, ErrorCode.TOO_SLOW: 1011}  # others 1008
Said = SpokenText | Segment | End | Error  # errors that are not fatal

In = TypeVar("In")
Out = TypeVar("Out")
InCo = TypeVar("InCo", covariant=True)
InContra = TypeVar("InContra", contravariant=True)
OutContra = TypeVar("OutContra", contravariant=True)


def has_left(socket: WebSocket) -> bool:
    """Whether its client has; between the pieces of a large message nobody waits for messages, and would notice."""
    return LEFT in socket.scope.get("extensions", {})


def agreed_subprotocol(socket: WebSocket) -> str | None:
    """What a client hands its key over by, if it does by subprotocol: it takes no answer without that."""
    return next((name for name in socket.scope.get("subprotocols") or [] if name in KEY_SUBPROTOCOLS), None)


def silent(idle_s: float) -> str:
    """What a client is told that has sent nothing for so long."""
    return f"nothing was sent for {idle_s:g} s"


class Gone(Exception):
    """The client has left."""


class Refused(Exception):
    """The conversation cannot go on for a reason the client is told."""

    def __init__(self, error: Error) -> None:
        super().__init__(error.message)
        self.error = error


def refused(code: ErrorCode, message: str) -> Refused:
    """A reason to end a conversation."""
    return Refused(Error(code=code, message=message))


class Then(Enum):
    """What follows the audio of a request."""

    LISTEN = auto()
    FLUSH = auto()  # everything is emitted, then `End`; a new utterance may begin
    FINISH = auto()  # the same, then the connection is closed


@dataclass(frozen=True)
class Request(Generic[Out]):
    """What a client's message leads to, in this order: replies, audio for the recogniser, and `then`."""

    replies: tuple[Out, ...] = ()
    audio: bytes = b""
    then: Then = Then.LISTEN


class Translator(Protocol[InContra, Out]):
    """One connection of a protocol, without I/O."""

    def start(self) -> Start:
        """What the audio is like; asked when an utterance begins."""
        ...

    def received(self, message: InContra) -> Request[Out]:
        """Understand a message of the client; raises Refused if the connection must end."""
        ...

    def said(self, message: Said) -> tuple[Out, ...]:
        """A native message on this protocol's wire; `End` comes once for each flush."""
        ...

    def failed(self, error: Error) -> tuple[Out, ...]:
        """The last messages before the connection is closed for `error`."""
        ...


class Transport(Protocol[InCo, OutContra]):
    """How whole messages travel."""

    async def receive(self) -> InCo:
        """The next message of the client; raises Gone or Refused."""
        ...

    async def send(self, message: OutContra) -> None:
        """Send one message, waiting while the client is slow; raises Gone."""
        ...

    async def close(self, error: Error | None) -> None:
        """Close the connection in order, or because of `error`."""
        ...


class Live:
    """Utterances of one client: each a `Session` of its own, all in the same row of an engine.

    Where an utterance wants another engine than the one before, it has a row of that one.
    """

    def __init__(self, engines: LiveEngines, lazy: bool = False, left: Callable[[], bool] = lambda: False) -> None:
        """`lazy` conversations take a row with the first audio, others when they begin.

        Once the client has `left`, no more audio is heard.
        """
        self.info, self.lazy, self._left = engines.greedy.info, lazy, left
        self._engines = engines
        self._stream: Stream | None = None
        self._opened, self._flushed = asyncio.Event(), asyncio.Event()
        self._session: Session | None = None
        self._incoming = Incoming(self.info.sample_rate)
        self._offset_samples = 0
        self._warnings: list[Error] = []
        self._phrases: tuple[str, ...] = ()

    def open(self, patient: bool | None = None) -> Stream:
        """Take a row if there is none yet; raises EngineError when the server is full."""
        if self._stream is None:
            self._stream = self._engines.of(patient).open(live=True)
            self._opened.set()
        return self._stream

    def close(self) -> None:
        """Give the row back."""
        self._incoming.close()
        if self._stream is not None:
            self._stream.close()

    @property
    def heard_s(self) -> float:
        """Seconds of audio since the connection began."""
        current = self._session.num_samples if self._session else 0
        return (self._offset_samples + current) / self.info.sample_rate

    async def hear(self, audio: bytes, start: Callable[[], Start]) -> None:
        """Give audio to the recogniser; `start` is asked for its description where an utterance begins with it.

        Raises Refused, EngineError or Gone.
        """
        session = self._session or await self._begin(start())
        async for piece in self._given(audio):
            await self._take(session, piece)
            await asyncio.sleep(0)
            if self._left():
                raise Gone

    async def end(self, start: Callable[[], Start], last: bool = False) -> None:
        """Ask for the end of the utterance, with or without audio; a container goes on, but after the `last` one."""
        session = self._session or await self._begin(start())
        if last:
            async for piece in self._given(Finish()):
                await self._take(session, piece)
        else:
            await self._take(session, Finish())
        self._flushed.clear()
        self.open().flush()

    async def flush(self, start: Callable[[], Start], last: bool = False) -> None:
        """As `end`, and wait until the reader of `messages` has done with it."""
        await self.end(start, last)
        await self._flushed.wait()

    async def messages(self) -> AsyncIterator[Said]:
        """What is said, utterance after utterance, each ending with `End`; raises EngineError."""
        await self._opened.wait()
        while True:
            async for message in self.utterance():
                yield message
            self._flushed.set()

    async def utterance(self) -> AsyncIterator[Said]:
        """What is said until the `End` of the current utterance."""
        stream: Stream | None = None
        while stream is not self._stream:  # given up for another before anything was said
            stream = self.open()
            async for emissions in stream.events():
                assert self._session is not None
                for message in self._session.emitted(emissions):
                    yield message
        assert self._session is not None
        warnings, self._warnings = self._warnings, []
        for warning in warnings:
            yield warning
        end = self._session.ended()
        self._offset_samples += self._session.num_samples
        self._session = None
        yield end

    async def settled(self) -> list[SpokenText | Segment]:
        """What is said once everything heard is recognised; for protocols in lockstep, instead of `messages`."""
        stream = self.open()
        await stream.settled()
        return self._session.emitted(stream.pending()) if self._session else []

    async def _begin(self, start: Start) -> Session:
        engine = self._engines.of(start.patient)
        if self._stream is not None and self._stream.engine is not engine:
            old = self._stream
            old.close()  # first: who has the last place may take it with him
            self._stream, self._phrases = engine.open(live=True), ()
            old.deliver([None])  # to whoever waits for what it says
        stream = self.open(start.patient)
        self._session = Session(uuid.uuid4().hex, engine.info, self._offset_samples)
        received = self._session.receive(self._incoming.started(start))
        stream.pause = received.pause
        if received.phrases != self._phrases:
            self._phrases = received.phrases
            await stream.favour(self._phrases)
        return self._session

    async def _given(self, message: bytes | Finish) -> AsyncIterator[bytes | Finish]:
        """What the session is given for it; raises Refused for audio that cannot be decoded, and EngineError."""
        try:
            async for piece in self._incoming.given(message):
                yield piece
        except AudioError as error:
            raise refused(error.code, str(error)) from None

    async def _take(self, session: Session, piece: bytes | Finish) -> None:
        received = session.receive(piece)
        self._check(received.messages)
        await self.open().write(received.samples)

    def _check(self, messages: tuple[object, ...]) -> None:
        for message in messages:
            if isinstance(message, Error):
                if message.fatal:
                    raise Refused(message)
                self._warnings.append(message)


async def converse(
    transport: Transport[In, Out],
    translator: Translator[In, Out],
    live: Live,
    idle_s: float,
    greeting: tuple[Out, ...] = (),
) -> None:
    """Serve one client to its end; whatever goes wrong ends this client only."""
    reader = asyncio.create_task(_read(transport, translator, live, idle_s, greeting))
    writer = asyncio.create_task(_write(transport, translator, live))
    try:
        done, _ = await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_COMPLETED)
        error = _why([task.exception() for task in done])
    except Gone:
        return
    finally:
        live.close()
        for task in (reader, writer):
            task.cancel()
        await asyncio.gather(reader, writer, return_exceptions=True)
    try:
        for message in translator.failed(error) if error else ():
            await transport.send(message)
        await transport.close(error)
    except Gone:
        return


def _why(exceptions: list[BaseException | None]) -> Error | None:
    """What to tell the client of the tasks' ends; None where there is nothing wrong, raises Gone if it has left."""
    for exception in exceptions:
        if isinstance(exception, Refused):
            return exception.error
        if isinstance(exception, EngineError):
            return Error(code=exception.code, message=str(exception))
        if isinstance(exception, Gone):
            raise exception
        if exception is not None:
            log.error("an adapter failed", exc_info=exception)
            return Error(code=ErrorCode.INTERNAL, message="the server failed on this connection")
    return None


async def receive_within(transport: Transport[In, Out], idle_s: float) -> In:
    """The next message; raises Gone, or Refused after `idle_s` without one."""
    try:
        async with asyncio.timeout(idle_s):
            return await transport.receive()
    except TimeoutError:
        raise refused(ErrorCode.IDLE, silent(idle_s)) from None


async def _read(
    transport: Transport[In, Out],
    translator: Translator[In, Out],
    live: Live,
    idle_s: float,
    greeting: tuple[Out, ...],
) -> None:
    """Client to recogniser, until the client finishes."""
    for out in greeting:
        await transport.send(out)
    if not live.lazy:
        live.open()
    while True:
        request = translator.received(await receive_within(transport, idle_s))
        for reply in request.replies:
            await transport.send(reply)
        if request.audio:
            await live.hear(request.audio, translator.start)
        if request.then is not Then.LISTEN:
            await live.flush(translator.start, last=request.then is Then.FINISH)
        if request.then is Then.FINISH:
            return


async def _write(transport: Transport[In, Out], translator: Translator[In, Out], live: Live) -> None:
    """Recogniser to client."""
    async for message in live.messages():
        for out in translator.said(message):
            await transport.send(out)


class WebSocketTransport:
    """Text and binary messages of an accepted WebSocket; text only to the client."""

    def __init__(self, socket: WebSocket) -> None:
        self._socket = socket

    async def receive(self) -> str | bytes:
        """See `Transport`."""
        try:
            message = await self._socket.receive()
        except (WebSocketDisconnect, RuntimeError):
            raise Gone from None
        if message["type"] == "websocket.disconnect":
            raise Gone
        text: str | None = message.get("text")
        data: bytes = message.get("bytes") or b""
        return data if text is None else text

    async def send(self, message: str) -> None:
        """See `Transport`."""
        try:
            await self._socket.send_text(message)
        except (WebSocketDisconnect, RuntimeError):
            raise Gone from None

    async def close(self, error: Error | None) -> None:
        """See `Transport`."""
        code = CLOSE_CODES.get(error.code, 1008) if error else 1000
        reason = error.message.encode()[:120].decode(errors="ignore") if error else ""
        try:
            await self._socket.close(code, reason)
        except (WebSocketDisconnect, RuntimeError):
            raise Gone from None
