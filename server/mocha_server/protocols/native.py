"""`/v1/stream`: moves bytes between a WebSocket, a `Session` and an engine `Stream`. Decides nothing itself."""

import asyncio
import uuid

from fastapi import APIRouter, WebSocket, WebSocketDisconnect
from pydantic import BaseModel

from mocha_server.engine import Engine
from mocha_server.messages import Error, ErrorCode
from mocha_server.protocols.live import cut
from mocha_server.session import Session, State
from mocha_server.stream import EngineError, Stream

router = APIRouter()


@router.websocket("/v1/stream")
async def stream(socket: WebSocket) -> None:
    """The native streaming protocol; see docs/protocol.md."""
    engine: Engine = socket.app.state.engine
    idle_s: float = socket.app.state.settings.idle_s
    await socket.accept()
    session = Session(uuid.uuid4().hex, engine.info)
    try:
        opened = engine.open(live=True)
    except EngineError as error:
        await _send(socket, session.failed(error.code, str(error)))
        await socket.close(1013)
        return
    idle = IdleTimer(idle_s)
    reader = asyncio.create_task(_read(socket, session, opened, idle))
    writer = asyncio.create_task(_write(socket, session, opened))
    idle.watch(reader)
    try:
        await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_COMPLETED)
        if not writer.done():
            why = f"nothing was sent for {idle_s:g} s"
            await _fail(socket, writer, session.failed(ErrorCode.IDLE, why) if idle.expired else await reader)
    except WebSocketDisconnect:
        pass
    finally:
        opened.close()
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
        left = self._idle_s if self.since is None else self.since + self._idle_s - now
        if left > 0:
            self._timer = self._loop.call_at(now + left, self._check, reader)
        else:
            self.expired = True
            reader.cancel()


async def _read(socket: WebSocket, session: Session, opened: Stream, idle: IdleTimer) -> Error:
    """Client to engine, until an error; raises WebSocketDisconnect when the client leaves."""
    while True:
        if session.state is not State.FINISHING:
            idle.waiting()
        message = await socket.receive()
        idle.since = None
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message.get("code", 1006))
        text = message.get("text")
        for piece in [text] if text is not None else cut(message.get("bytes", b"")):
            received = session.receive(piece)
            for out in received.messages:
                if isinstance(out, Error) and out.fatal:
                    return out
                await _send(socket, out)
            if received.phrases:
                await opened.favour(received.phrases)
            await opened.write(received.samples)
            if received.finished:
                opened.finish()
            await asyncio.sleep(0)


async def _write(socket: WebSocket, session: Session, opened: Stream) -> None:
    """Engine to client; closes the socket after `end`."""
    try:
        async for emissions in opened.events():
            for message in session.emitted(emissions):
                await _send(socket, message)
        await _send(socket, session.ended())
        await socket.close()
    except EngineError as error:
        await _send(socket, session.failed(error.code, str(error)))
        await socket.close(1011)
    except (WebSocketDisconnect, RuntimeError):  # the client is gone; the reader cleans up
        return


async def _fail(socket: WebSocket, writer: "asyncio.Task[None]", error: Error) -> None:
    writer.cancel()
    await asyncio.gather(writer, return_exceptions=True)
    await _send(socket, error)
    await socket.close(1008)


async def _send(socket: WebSocket, message: BaseModel) -> None:
    await socket.send_text(message.model_dump_json())
