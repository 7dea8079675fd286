"""WebSockets as the server has them: how far ahead they read, clients that do not read. And how a server ends."""

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from mocha_server import serving

LARGE = bytes(1 << 23)
BUFFERED = 1 << 17


async def until(holds: Callable[[], bool]) -> None:
    """Wait for it, 5 seconds at most."""
    for _ in range(500):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise TimeoutError


@asynccontextmanager
async def served(app: Callable[..., Any]) -> AsyncIterator[int]:
    """A real uvicorn, set up as the product's, for an application of the test's own; its port.

    Its sockets' buffers do not grow with what they are sent, as they else may, to 32 MiB on some machines.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFERED)
    server = serving.server(app)  # type: ignore[arg-type]
    running = asyncio.create_task(server.serve([listener]))
    await until(lambda: server.started)
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await asyncio.wait_for(running, 30)


async def accepted(scope: Any, receive: Any, send: Any) -> bool:
    """Whether it is a WebSocket, which then is accepted; else that of the lifespan, to its end."""
    if scope["type"] == "websocket":
        assert (await receive())["type"] == "websocket.connect"
        await send({"type": "websocket.accept"})
        return True
    while (message := await receive())["type"] != "lifespan.shutdown":
        await send({"type": f"{message['type']}.complete"})
    await send({"type": "lifespan.shutdown.complete"})
    return False


@pytest.mark.parametrize(("size", "most"), [(len(LARGE), 2), (1000, 10_000)])
async def test_large_messages_wait_at_the_clients(size: int, most: int):
    """One waits for the application, and the start of the next is in the sockets' buffers; small ones fill these."""
    leave = asyncio.Event()

    async def idle(scope: Any, receive: Any, send: Any) -> None:
        if await accepted(scope, receive, send):
            await leave.wait()

    async with served(idle) as port, connect(f"ws://127.0.0.1:{port}/", ping_interval=None) as client:
        client.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFERED)
        sent = 0
        with contextlib.suppress(TimeoutError):
            while sent < most:
                await asyncio.wait_for(client.send(LARGE[:size]), 1 if sent else 30)
                sent += 1
        leave.set()
        client.transport.abort()
    assert 1 <= sent < most


async def unread(port: int) -> socket.socket:
    """A client that says hello and then reads nothing."""
    client = socket.create_connection(("127.0.0.1", port))
    hello = ("GET / HTTP/1.1", "Host: x", "Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13")
    client.sendall("\r\n".join((*hello, "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==", "", "")).encode())
    await asyncio.sleep(0)
    return client


@pytest.mark.parametrize("last", ["websocket.send", "websocket.close"])
async def test_a_client_that_does_not_read_is_given_up(monkeypatch: pytest.MonkeyPatch, last: str):
    monkeypatch.setattr(serving, "SLOW_S", 0.3)
    why: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def talkative(scope: Any, receive: Any, send: Any) -> None:
        if await accepted(scope, receive, send):
            await send({"type": "websocket.send", "bytes": LARGE})  # more than the sockets' buffers hold
            try:
                if last == "websocket.send":
                    await send({"type": last, "text": "more"})
                else:
                    protocol = send.__self__
                    protocol.writable.set()  # as where what it has not read is less than a transport holds back
                    await send({"type": last})
                    while (await receive())["type"] != "websocket.disconnect":
                        pass
                    await until(lambda: protocol.disconnected)
                why.set_result(None)
            except OSError as error:
                why.set_result(error)

    async with served(talkative) as port:
        client = await unread(port)
        error = await asyncio.wait_for(why, 10)
        assert (error is not None) == (last == "websocket.send")
        client.close()


def masked(opcode: int, payload: bytes) -> bytes:
    """A frame of a client."""
    return bytes([0x80 | opcode, 0x80 | len(payload)]) + bytes(4) + payload


async def test_answers_to_pings_that_nobody_reads_do_not_pile_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(serving, "SLOW_S", 5)
    protocols: list[Any] = []

    async def idle(scope: Any, receive: Any, send: Any) -> None:
        if await accepted(scope, receive, send):
            protocols.append(send.__self__)
            await receive()

    async with served(idle) as port:
        client = await unread(port)
        await until(lambda: bool(protocols))
        client.setblocking(False)
        pings, most = masked(9, bytes(125)) * 500, 0
        for _ in range(400):  # 26 MB
            with contextlib.suppress(OSError):
                await asyncio.wait_for(asyncio.get_running_loop().sock_sendall(client, pings), 1)
            most = max(most, protocols[0].transport.get_write_buffer_size())
        assert 0 < most < 1 << 20
        client.close()


@pytest.mark.parametrize("closes", [True, False], ids=["who closes", "who does not"])
async def test_a_client_that_does_not_read_keeps_no_server_from_ending(monkeypatch: pytest.MonkeyPatch, closes: bool):
    monkeypatch.setattr(serving, "SLOW_S", 0.3)
    monkeypatch.setattr(serving, "SHUTDOWN_S", 600)  # which is what files have, and clients like this do not take
    answered = asyncio.Event()

    async def idle(scope: Any, receive: Any, send: Any) -> None:
        if await accepted(scope, receive, send):
            send.__self__.transport.write(LARGE)  # as where answers to its pings wait
            answered.set()
            while (await receive())["type"] != "websocket.disconnect":
                pass

    async with served(idle) as port:
        client = await unread(port)
        await asyncio.wait_for(answered.wait(), 30)
        if closes:
            client.sendall(masked(8, b""))
            await asyncio.sleep(0.1)
    client.close()  # the server has ended by now


async def test_text_that_is_no_utf_8_closes_the_connection_and_is_no_error_of_ours(caplog: pytest.LogCaptureFixture):
    async def listening(scope: Any, receive: Any, send: Any) -> None:
        if await accepted(scope, receive, send):
            while (await receive())["type"] != "websocket.disconnect":
                pass

    async with served(listening) as port, connect(f"ws://127.0.0.1:{port}/") as client:
        client.transport.write(masked(1, b"\xff\xfe"))
        with pytest.raises(ConnectionClosed):
            await client.recv()
        assert client.close_code == 1007
    assert not [r for r in caplog.records if r.name == "uvicorn.error" and r.levelname == "ERROR"]


BEGINNING = """
import asyncio, contextlib, threading
from fastapi import FastAPI
from mocha_server import serving

@contextlib.asynccontextmanager
async def lifespan(app):
    print("begins", flush=True)
    await asyncio.to_thread(threading.Event().wait)  # as for an engine
    yield

serving.run(FastAPI(lifespan=lifespan), serving.listen("127.0.0.1", 0), 1)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_server_that_does_not_serve_yet_ends_at_once(number: int):
    with subprocess.Popen([sys.executable, "-c", BEGINNING], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as server:
        assert server.stdout
        assert server.stdout.readline() == b"begins\n"
        server.send_signal(number)
        try:
            _, errors = server.communicate(timeout=60)
        finally:
            server.kill()
    assert server.returncode == -number and not errors
