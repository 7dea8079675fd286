"""Connections as the server has them: how far ahead they read, clients that are silent, do not read, or talk nonsense.

And how a server ends.
"""

import asyncio
import contextlib
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from mocha_server import serving, workers
from mocha_server.settings import Settings

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
async def served(app: Callable[..., Any], **settings: Any) -> AsyncIterator[int]:
    """A real uvicorn, set up as the product's, for an application of the test's own; its port.

    Its sockets' buffers do not grow with what they are sent, as they else may, to 32 MiB on some machines.
    """
    app.state = SimpleNamespace(settings=Settings(**settings))  # type: ignore[attr-defined]
    listener = serving.listen("127.0.0.1", 0)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFERED)
    server = serving.server(app)  # type: ignore[arg-type]
    running = asyncio.create_task(server.serve([listener]))
    await until(lambda: server.started)
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await asyncio.wait_for(running, 30)


async def answer(send: Any, body: bytes) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


async def accepted(scope: Any, receive: Any, send: Any) -> bool:
    """Whether it is a WebSocket, which then is accepted; else a request, or the lifespan, to its end."""
    if scope["type"] == "http":
        await answer(send, b"hello")
        return False
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


async def plain(scope: Any, receive: Any, send: Any) -> None:
    """Answers each request, and hears WebSockets to their end."""
    if await accepted(scope, receive, send):
        while (await receive())["type"] != "websocket.disconnect":
            pass


HELLO = b"GET / HTTP/1.1\r\nHost: x\r\n"
UPGRADE = b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
UPGRADE += b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"


async def exchanged(port: int, *sent: bytes) -> bytes:
    """What the server says until it ends a connection on which each of these was answered, or `sent` is all."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    said = b""
    try:
        for data in sent:
            writer.write(data)
            said += await asyncio.wait_for(reader.read(1 << 16), 5)
        while more := await asyncio.wait_for(reader.read(1 << 16), 5):
            said += more
    finally:
        writer.close()
    return said


@pytest.mark.parametrize("kind", ["pings", "a body in chunks"])
async def test_a_flood_of_small_things_is_read_in_small_pieces(monkeypatch: pytest.MonkeyPatch, kind: str):
    """Between them others have their turn: a quarter of a megabyte of empty frames takes seconds."""
    protocol = serving.ReadAhead if kind == "pings" else serving.Http
    sizes: list[int] = []

    def note(self: Any, data: bytes) -> None:
        sizes.append(len(data))  # and forget them

    async with served(plain) as port:
        client = await unread(port) if kind == "pings" else socket.create_connection(("127.0.0.1", port))
        if kind == "pings":
            assert await asyncio.to_thread(client.recv, 1000)
        monkeypatch.setattr(protocol, "data_received", note)
        await asyncio.to_thread(client.sendall, masked(9, b"") * 200_000)
        client.close()
        await until(lambda: sum(sizes) == 1_200_000)
    assert 0 < max(sizes) <= serving.READ_BYTES


@pytest.mark.parametrize("begun", [b"", b"GET / HT", HELLO + b"X: ", HELLO + b"\r\nGET /"])
async def test_a_request_that_does_not_come_is_not_waited_for(begun: bytes):
    async with served(plain, idle_s=0.3) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(begun)
        trickling = asyncio.create_task(trickle(writer) if begun else asyncio.sleep(0))
        said = await asyncio.wait_for(reader.read(), 3)
        assert said.count(b"HTTP/1.1 200 OK") == begun.count(HELLO + b"\r\n")
        trickling.cancel()
        writer.close()


async def trickle(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while True:
            await asyncio.sleep(0.1)
            writer.write(b"a")
            await writer.drain()


async def test_what_follows_an_answer_is_no_request_that_does_not_come():
    """Of the body of a request that was answered at once, some is on its way for longer than a head may be."""
    async with served(plain, idle_s=0.6) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HELLO + b"Content-Length: 10\r\n\r\n")
        for _ in range(10):
            await asyncio.sleep(0.1)
            writer.write(b"a")
        writer.write(HELLO + b"Connection: close\r\n\r\n")
        said = await asyncio.wait_for(reader.read(), 3)
        assert said.count(b"HTTP/1.1 200 OK") == 2
        writer.close()


async def test_a_request_that_has_come_may_take_its_time():
    async def slow(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await asyncio.sleep(1)
        await plain(scope, receive, send)

    async with served(slow, idle_s=0.3) as port, connect(f"ws://127.0.0.1:{port}/") as client:
        assert b"hello" in await exchanged(port, HELLO + b"Connection: close\r\n\r\n")
        await client.ping()  # nor is a WebSocket closed


async def test_an_answer_that_nobody_reads_is_given_up(monkeypatch: pytest.MonkeyPatch):
    """Also where a WebSocket follows. One that is read slowly is not."""
    monkeypatch.setattr(serving, "SLOW_S", 0.6)
    protocols: list[Any] = []

    async def talkative(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await plain(scope, receive, send)
            return
        protocols.append(send.__self__)
        protocols[-1].transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFERED)
        await answer(send, LARGE)

    async with served(talkative) as port:
        for num_before, (reads, then) in enumerate([(True, b""), (False, b""), (False, HELLO + UPGRADE + b"\r\n")]):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=BUFFERED)
            writer.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFERED)
            writer.write(HELLO + b"\r\n" + then)
            await until(lambda n=num_before: len(protocols) > n)
            for _ in range(8 if reads else 0):
                await asyncio.sleep(0.1)
                await reader.readexactly(BUFFERED)
            assert not protocols[-1].transport.is_closing()
            await until(lambda: not protocols[-1].transport.get_write_buffer_size())
            writer.close()


async def test_a_websocket_after_an_answer_that_was_read_late_stays(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(serving, "SLOW_S", 0.3)

    async def talkative(scope: Any, receive: Any, send: Any) -> None:
        await (answer(send, LARGE) if scope["type"] == "http" else plain(scope, receive, send))

    async with served(talkative) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HELLO + b"\r\n" + HELLO + UPGRADE + b"\r\n")
        await asyncio.sleep(0.1)
        await reader.readexactly(len(LARGE))
        await reader.readuntil(b"101 Switching")
        await asyncio.sleep(0.8)
        writer.write(masked(9, b"still there"))
        await asyncio.wait_for(reader.readuntil(b"still there"), 3)
        writer.close()


async def test_an_upgrade_that_is_no_handshake_is_refused(caplog: pytest.LogCaptureFixture):
    async with served(plain) as port:
        for wrong, status in (
            (b"POST" + HELLO[3:] + UPGRADE + b"Content-Length: 5\r\n\r\nabcde", 400),
            (HELLO + UPGRADE + b"".join(b"x%d: y\r\n" % n for n in range(129)) + b"\r\n", 431),
            (HELLO + UPGRADE + b"x: " + b"y" * 9000 + b"\r\n\r\n", 431),
            (b"GET /?" + b"y" * 9000 + HELLO[5:] + UPGRADE + b"\r\n", 414),
        ):
            assert (await exchanged(port, wrong)).startswith(b"HTTP/1.1 %d " % status)
    assert not [r for r in caplog.records if r.levelname == "ERROR"]


@pytest.mark.parametrize("wrong", [b"ZZZ\r\n", b"5\r\nab", b"\0\r\n\r\n"])
async def test_nonsense_after_an_answer_is_no_error_of_ours(caplog: pytest.LogCaptureFixture, wrong: bytes):
    async with served(plain) as port:
        said = await exchanged(port, HELLO + b"Transfer-Encoding: chunked\r\n\r\n", wrong + b"\r\nZZZ\r\n")
        assert said.count(b"HTTP/1.1 200 OK") == 1
        assert b"HTTP/1.1 400 " in await exchanged(port, HELLO + b"\r\n", b"\0\r\n\r\n")
    assert not [r for r in caplog.records if r.levelname == "ERROR"]


async def test_too_many_open_files_are_no_end_and_no_flood_of_errors(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(asyncio.constants, "ACCEPT_RETRY_DELAY", 0.1)  # type: ignore[attr-defined]
    monkeypatch.setattr(workers.TOO_MANY_FILES, "_due_s", 0)
    accept, asked = socket.socket.accept, []
    monkeypatch.setattr(socket.socket, "accept", lambda self: (asked.append(0), accept(self))[1])
    async with served(plain) as port, connect(f"ws://127.0.0.1:{port}/") as client:
        writers = [(await asyncio.open_connection("127.0.0.1", port))[1]]
        waiting = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (waiting[-1].fileno() + 1, hard))
        try:
            for _ in range(10):
                await asyncio.wait_for(await client.ping(), 1)
                await asyncio.sleep(0.05)  # in all for longer than asyncio pauses
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert b"hello" in await exchanged(port, HELLO + b"Connection: close\r\n\r\n")
        for each in (*writers, *waiting):
            each.close()
    assert len(asked) < 100  # not thousands of times in each of its turns
    assert len(caplog.records) == 1 and "too many files are open" in caplog.text and "Traceback" not in caplog.text


def test_as_many_files_may_be_open_as_the_operator_allows():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft // 2, hard))
    try:
        serving.allow_many_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


BEGINNING = """
import asyncio, contextlib, threading
from fastapi import FastAPI
from mocha_server import serving, workers
from mocha_server.settings import Settings

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


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6 and IPv4 on one socket")
def test_one_address_for_both_families():
    with serving.listen("::", 0) as listener:
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, listener.getsockname()[1])).close()
