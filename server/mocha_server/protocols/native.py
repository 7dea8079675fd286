"""`/v1/stream`: moves bytes between a WebSocket, a `Session` and an engine `Stream`. Decides nothing itself."""

import asyncio
import logging
import uuid
from contextlib import suppress

from fastapi import APIRouter, WebSocket, WebSocketDisconnect
from pydantic import BaseModel

from mocha_server.audio import AudioError
from mocha_server.incoming import Incoming
from mocha_server.live_engines import LiveEngines
from mocha_server.messages import Error, ErrorCode, Start
from mocha_server.protocols.live import CLOSE_CODES, agreed_subprotocol, has_left, silent
from mocha_server.session import OutMessage, Session, State, parsed
from mocha_server.stream import EngineError, Stream

LATE_S = 1.0  # a timer so late did not run: the process was suspended, and what came meanwhile is not read yet
log = logging.getLogger(__name__)
router = APIRouter()


@router.websocket("/v1/stream")
async def stream(socket: WebSocket) -> None:
    """The native streaming protocol; see docs/protocol.md."""
    with suppress(WebSocketDisconnect):  # the client may leave at any time
        await socket.accept(agreed_subprotocol(socket))
        await _serve(socket, socket.app.state.live, socket.app.state.settings.idle_s)


async def _serve(socket: WebSocket, engines: LiveEngines, idle_s: float) -> None:
    """A client from its first message to its last; raises WebSocketDisconnect when it leaves before."""
    identifier = uuid.uuid4().hex
    try:
        async with asyncio.timeout(idle_s):
            first = parsed(await _receive(socket))
    except TimeoutError:
        error = Session(identifier, engines.greedy.info).failed(ErrorCode.IDLE, silent(idle_s))
        await _refuse(socket, error)
        return
    engine = engines.of(first.patient if isinstance(first, Start) else None)
    session, incoming = Session(identifier, engine.info), Incoming(engine.info.sample_rate)
    began = session.receive(incoming.started(first) if isinstance(first, Start) else first)
    if session.state is State.CLOSED:
        await _refuse(socket, began.messages[0])
        return
    try:
        opened = engine.open(live=True)
    except EngineError as error:
        await _refuse(socket, session.failed(error.code, str(error)))
        return
    try:
        for out in began.messages:
            await _send(socket, out)
        opened.pause = began.pause
        if began.phrases:
            await opened.favour(began.phrases)
        await _converse(socket, session, incoming, opened, idle_s)
    finally:
        incoming.close()
        opened.close()


async def _refuse(socket: WebSocket, error: OutMessage) -> None:
    """Tell the client why, and close."""
    await _send(socket, error)
    await socket.close(CLOSE_CODES.get(error.code, 1008) if isinstance(error, Error) else 1008)


async def _converse(socket: WebSocket, session: Session, incoming: Incoming, opened: Stream, idle_s: float) -> None:
    """What follows the start message, to the end; raises WebSocketDisconnect when the client leaves."""
    idle = IdleTimer(idle_s)
    reader = asyncio.create_task(_read(socket, session, incoming, opened, idle))
    writer = asyncio.create_task(_write(socket, session, opened))
    idle.watch(reader)
    try:
        await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_COMPLETED)
        if writer.done() and (broken := writer.exception()) is not None:
            log.error("a stream's messages cannot be written", exc_info=broken)
            opened.close()
            await _refuse(socket, session.failed(ErrorCode.INTERNAL, "the server failed on this stream"))
        elif not writer.done():
            error = session.failed(ErrorCode.IDLE, silent(idle_s)) if idle.expired else await reader
            opened.close()  # before the client is told, which may not read it
            await _fail(socket, writer, error)
    finally:
        idle.stop()
        reader.cancel()
        writer.cancel()
        await asyncio.gather(reader, writer, return_exceptions=True)


class IdleTimer:
    """Cancels a reader that has waited too long for a message; costs a message no more than two assignments."""

    def __init__(self, idle_s: float) -> None:
        self._idle_s, self._loop = idle_s, asyncio.get_running_loop()
        self.since: float | None = None  # when the reader began to wait; None while it does not
        self.expired = False

    def watch(self, reader: "asyncio.Task[Error]") -> None:
        """Begin."""
        self._timer = self._loop.call_later(self._idle_s, self._check, reader)

    def waiting(self) -> None:
        """The reader waits for the client from now on."""
        self.since = self._loop.time()

    def stop(self) -> None:
        """Watch no longer."""
        self._timer.cancel()

    def _check(self, reader: "asyncio.Task[Error]") -> None:
        now = self._loop.time()
        if self.since is not None and now - self._timer.when() > LATE_S:
            self.since = now
        left = self._idle_s if self.since is None else self.since + self._idle_s - now
        if left > 0:
            self._timer = self._loop.call_at(now + left, self._check, reader)
        else:
            self.expired = True
            reader.cancel()


async def _receive(socket: WebSocket) -> str | bytes:
    """The next message; raises WebSocketDisconnect."""
    message = await socket.receive()
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message.get("code", 1006))
    text: str | None = message.get("text")
    data: bytes = message.get("bytes") or b""
    return data if text is None else text


async def _read(socket: WebSocket, session: Session, incoming: Incoming, opened: Stream, idle: IdleTimer) -> Error:
    """Client to engine, until an error; raises WebSocketDisconnect when the client leaves."""
    while True:
        if session.state is not State.FINISHING:
            idle.waiting()
        data = await _receive(socket)
        idle.since = None
        try:
            async for piece in incoming.given(parsed(data)):
                received = session.receive(piece)
                for out in received.messages:
                    if isinstance(out, Error) and out.fatal:
                        return out
                    await _send(socket, out)
                await opened.write(received.samples)
                if received.finished:
                    opened.finish()
                await asyncio.sleep(0)
                if has_left(socket):
                    raise WebSocketDisconnect(1006)
        except (AudioError, EngineError) as error:
            return session.failed(error.code, str(error))


async def _write(socket: WebSocket, session: Session, opened: Stream) -> None:
    """Engine to client; closes the socket after `end`."""
    try:
        async for emissions in opened.events():
            for message in session.emitted(emissions):
                await _send(socket, message)
        await _send(socket, session.ended())
        await socket.close()
    except EngineError as error:
        await _refuse(socket, session.failed(error.code, str(error)))
    except (WebSocketDisconnect, RuntimeError):  # the client is gone; the reader cleans up
        return


async def _fail(socket: WebSocket, writer: "asyncio.Task[None]", error: Error) -> None:
    writer.cancel()
    await asyncio.gather(writer, return_exceptions=True)
    await _refuse(socket, error)


async def _send(socket: WebSocket, message: BaseModel) -> None:
    await socket.send_text(message.model_dump_json())
