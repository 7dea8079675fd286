"""How the application is put on a socket: uvicorn set up for very many small messages, in one process or several.

No routes, no model.
"""

import asyncio
import gc
import logging
import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame

from mocha_model.allocator import keep_memory
from mocha_server.protocols.live import LEFT, SLOW_S
from mocha_server.workers import TOO_MANY_FILES, Handed, Listener, Workers

READ_BYTES = 1 << 14  # of a connection at a time: thousands of frames or chunks of a body, if they are empty
IDLE_S = 60.0  # where an application has no settings
READ_AHEAD = 4  # messages a connection may have waiting before its socket is left unread
READ_AHEAD_BYTES = 1 << 16  # of a message; one that is larger is the last to wait
BACKLOG = 2048
SHUTDOWN_S = 5  # that files on their way have when the server ends; whoever ends it may wait for 10


class Http(H11Protocol):
    """uvicorn's HTTP, but nobody waits for ever: not for a request to come, and not until its answer is read."""

    late: asyncio.TimerHandle | None = None  # closes the connection unless a request comes
    unread: asyncio.TimerHandle | None = None  # breaks it unless the client reads

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        transport.max_size = READ_BYTES  # type: ignore[attr-defined]  # asyncio's own is 256 KiB
        transport.set_write_buffer_limits(0)  # so that `pause_writing` tells of all that the client has not read
        self._expect_request()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        super().data_received(data)
        if self.late is not None and self.conn.their_state is not h11.IDLE:
            self.late.cancel()
            self.late = None
        answered = self.cycle is None or self.cycle.response_complete
        if answered and self.late is None and self.transport.get_protocol() is self:
            self._expect_request()  # or more of a body for which the answer has not waited

    def _expect_request(self) -> None:
        settings = getattr(getattr(self.config.app, "state", None), "settings", None)
        self.late = self.loop.call_later(settings.idle_s if settings else IDLE_S, self.transport.close)

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Hand the connection over."""
        self._forgive()
        self.transport.set_write_buffer_limits()
        super().handle_websocket_upgrade(event)

    def _forgive(self) -> None:
        for timer in (self.late, self.unread):
            if timer is not None:
                timer.cancel()

    def pause_writing(self) -> None:
        """See `asyncio.BaseProtocol`: something waits for the client."""
        super().pause_writing()
        self._expect_reading()

    def _expect_reading(self) -> None:
        self.unread = self.loop.call_later(SLOW_S, self._look_again, self.transport.get_write_buffer_size())

    def _look_again(self, before_bytes: int) -> None:
        """A long answer may take its time, if the client reads at all."""
        if self.transport.get_write_buffer_size() < before_bytes:
            self._expect_reading()
        else:
            self.transport.abort()

    def resume_writing(self) -> None:
        """See `asyncio.BaseProtocol`."""
        super().resume_writing()
        if self.unread is not None:
            self.unread.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._forgive()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """End, as what the client sent is no request; it is told so unless it has an answer, or part of one."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        self.transport.close()
        if self.cycle is not None:
            self.cycle.disconnected = True  # what the application still says goes nowhere


class ReadAhead(WebSocketsSansIOProtocol):
    """uvicorn's WebSockets, but reading pauses after a few messages instead of after each: two system calls less.

    And nobody waits for ever for a client that does not read, or works for one that has left.
    """

    unread: asyncio.TimerHandle | None = None  # breaks the connection unless the client reads

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.BaseProtocol`."""
        super().connection_made(transport)
        if self.transport.get_write_buffer_size():  # answers to requests before this one
            self.pause_writing()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`. uvicorn leaves a request that is no handshake without an answer, and open."""
        super().data_received(data)
        if self.conn.handshake_exc is not None and not self.handshake_initiated:
            answer = b"".join(self.conn.data_to_send())  # none where the request cannot be parsed
            self.transport.write(answer or self.conn.reject(400, "This is no WebSocket handshake.\n").serialize())
            self.transport.close()
            self._expect_reading()

    def _expect_reading(self) -> None:
        self._forgive()
        self.unread = self.loop.call_later(SLOW_S, self.transport.abort)

    def _forgive(self) -> None:
        if self.unread is not None:
            self.unread.cancel()

    def pause_writing(self) -> None:
        """See `asyncio.BaseProtocol`: too much waits for the client."""
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        """See `asyncio.BaseProtocol`."""
        super().resume_writing()
        if not (self.close_sent or self.transport.is_closing()):
            self._forgive()

    def handle_close(self, event: Frame) -> None:
        """End, as the client has; what it does not read then is lost."""
        super().handle_close(event)
        self._expect_reading()

    def handle_parser_exception(self) -> None:
        """End, as what the client sent is no WebSocket's."""
        super().handle_parser_exception()
        self._expect_reading()

    def handle_ping(self) -> None:
        """Answer, unless answers wait for the client already."""
        if self.writable.is_set():
            super().handle_ping()
        else:
            self.conn.data_to_send()

    def shutdown(self) -> None:
        """Close, as the server ends."""
        if not self.transport.is_closing():
            super().shutdown()
        self._expect_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._forgive()
        if hasattr(self, "scope"):  # else before the handshake
            self.scope["extensions"][LEFT] = {}
        super().connection_lost(exc)

    def send_receive_event_to_app(self) -> None:
        """Queue the message at hand for the application. Text that is not UTF-8 ends the connection."""
        if self.curr_msg_data_type == "text" and not self.close_sent:
            try:
                b"".join(self.frames).decode()
            except UnicodeDecodeError:
                self.frames = []
                self.conn.send_close(1007)
                self.handle_parser_exception()
                return
        is_small = sum(map(len, self.frames)) <= READ_AHEAD_BYTES
        reads_on = is_small and not self.read_paused and self.queue.qsize() < READ_AHEAD
        if reads_on:
            self.read_paused = True  # as far as the base class can see
        super().send_receive_event_to_app()
        if reads_on:
            self.read_paused = False

    async def send(self, message: Any) -> None:
        """As in uvicorn, which logs an error for each client refused in the handshake (until its pull request 3138).

        Raises ClientDisconnected where the client has left, or not read for `SLOW_S`; then its connection is broken.
        """
        await super().send(message)
        if message["type"] == "websocket.close":
            self._expect_reading()  # what it has not read then is lost
        if message["type"] == "websocket.http.response.body":
            self.handshake_complete = True


def _say(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """What an event loop has to say; that it cannot accept for now is no error of ours, and needs no traceback."""
    if "out of system resource" in context["message"]:
        TOO_MANY_FILES.warn()
    else:
        loop.default_exception_handler(context)


class _Server(uvicorn.Server):
    """A server that says when it serves."""

    def __init__(self, config: uvicorn.Config, started: Callable[[], None]) -> None:
        super().__init__(config)
        self._tell = started

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End, at once where it does not serve yet: engines take seconds to begin, and nobody has to be told."""
        if not self.started:
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)
            os._exit(128 + sig)  # the first process of a container, which such signals do not end
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See `uvicorn.Server`."""
        asyncio.get_running_loop().set_exception_handler(_say)
        await super().startup(sockets)
        if self.started:
            self._tell()


def server(app: FastAPI, started: Callable[[], None] = lambda: None) -> uvicorn.Server:
    """A server of `app`, to be run on a socket; calls `started` when it serves.

    Messages are not compressed: they are small, and a compressor costs more memory than all else of a stream. A pong
    may take its time: that of a client which sends faster than real time waits behind all the audio it has written.
    Clients that are gone are found by `Settings.idle_s`. The event loop is asyncio's own: `Handed` needs one that
    accepts in Python.
    """
    logging.getLogger("python_multipart").setLevel(logging.ERROR)  # a bad form is its client's to know, and is told
    config = uvicorn.Config(
        app,
        log_config=None,  # whoever starts it says where and how to log
        log_level="warning",
        loop="asyncio",
        http=Http,
        ws=ReadAhead,
        ws_per_message_deflate=False,
        ws_ping_timeout=None,
        timeout_graceful_shutdown=SHUTDOWN_S,
    )
    return _Server(config, started)


def listen(host: str, port: int) -> socket.socket:
    """The socket to serve from, of both families for `::`; raises OSError if the address cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = host == "::" and socket.has_dualstack_ipv6()
    served = socket.create_server((host, port), family=family, backlog=BACKLOG, dualstack_ipv6=both)
    return Listener(fileno=served.detach())


def allow_many_files() -> None:
    """As many connections as the operator lets this process have: by default a shell's limit is often 1024 files."""
    with suppress(ImportError, ValueError, OSError):  # Windows has no such limit, macOS one below its own hard one
        import resource

        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def run(app: FastAPI, listener: socket.socket, workers: int, started: Callable[[], None] = lambda: None) -> None:
    """Serve until interrupted, with `workers` processes forked from this one, so that they share its weights.

    Calls `started` in the first process that serves.
    """
    keep_memory()
    allow_many_files()
    gc.collect()
    gc.freeze()  # collecting all of it would stop a server for a fifth of a second, and copy what workers share
    if workers == 1:
        server(app, started).run([listener])
        return
    told, untold = os.pipe()
    os.set_blocking(told, False)
    os.write(untold, b"+")  # for the first to take

    def tell() -> None:
        with suppress(BlockingIOError):
            os.read(told, 1)
            started()

    def serve(place: int, handed: Handed) -> None:
        app.state.metrics.become(place)
        server(app, tell).run([handed])

    Workers(workers, listener, serve).run()
