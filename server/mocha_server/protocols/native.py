"""`/v1/stream`: moves bytes between a WebSocket, a `Session` and an engine `Stream`. Decides nothing itself."""

import asyncio
import uuid

from fastapi import APIRouter, WebSocket, WebSocketDisconnect
from pydantic import BaseModel

from mocha_server.engine import Engine, EngineError, Stream
from mocha_server.messages import Error, ErrorCode
from mocha_server.session import Session, State

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
    writer = asyncio.create_task(_write(socket, session, opened))
    try:
        await _read(socket, session, opened, writer, idle_s)
    except WebSocketDisconnect:
        writer.cancel()
    finally:
        opened.close()
        await asyncio.gather(writer, return_exceptions=True)


async def _read(
    socket: WebSocket, session: Session, opened: Stream, writer: "asyncio.Task[None]", idle_s: float
) -> None:
    """Client to engine, until the writer has closed the stream or an error does."""
    while not writer.done():
        incoming = asyncio.create_task(socket.receive())
        timeout = None if session.state is State.FINISHING else idle_s
        done, _ = await asyncio.wait({incoming, writer}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if incoming not in done:
            incoming.cancel()
            if not done:
                await _fail(socket, writer, session.failed(ErrorCode.IDLE, f"nothing was sent for {idle_s:g} s"))
            return
        message = incoming.result()
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message.get("code", 1006))
        data = message["text"] if message.get("text") is not None else message.get("bytes", b"")
        received = session.receive(data)
        for out in received.messages:
            if isinstance(out, Error) and out.fatal:
                await _fail(socket, writer, out)
                return
            await _send(socket, out)
        await opened.write(received.samples)
        if received.finished:
            opened.finish()


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
