"""How the application is put on a socket: uvicorn set up for very many small messages, in one process or several.

No routes, no model.
"""

import asyncio
import logging
import multiprocessing
import os
import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame

from mocha_model.allocator import keep_memory
from mocha_server.protocols.live import LEFT, SLOW_S
from mocha_server.workers import Handed, Workers

READ_AHEAD = 4  # messages a connection may have waiting before its socket is left unread
READ_AHEAD_BYTES = 1 << 16  # of a message; one that is larger is the last to wait
BACKLOG = 2048
SHUTDOWN_S = 5  # that files on their way have when the server ends; whoever ends it may wait for 10


class ReadAhead(WebSocketsSansIOProtocol):
    """uvicorn's WebSockets, but reading pauses after a few messages instead of after each: two system calls less.

    And nobody waits for ever for a client that does not read, or works for one that has left.
    """

    unread: asyncio.TimerHandle | None = None  # breaks the connection unless the client reads

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
        log_level="warning",
        loop="asyncio",
        ws=ReadAhead,
        ws_per_message_deflate=False,
        ws_ping_timeout=None,
        timeout_graceful_shutdown=SHUTDOWN_S,
    )
    return _Server(config, started)


def listen(host: str, port: int) -> socket.socket:
    """The socket to serve from; raises OSError if the address cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=BACKLOG)


def run(app: FastAPI, listener: socket.socket, workers: int, started: Callable[[], None] = lambda: None) -> None:
    """Serve until interrupted, with `workers` processes forked from this one, so that they share its weights.

    Calls `started` in the first process that serves.
    """
    keep_memory()
    if workers == 1:
        server(app, started).run([listener])
        return
    first = multiprocessing.get_context("fork").Lock()  # which it never gives back

    def serve(place: int, handed: Handed) -> None:
        app.state.metrics.become(place)
        server(app, lambda: started() if first.acquire(block=False) else None).run([handed])

    Workers(workers, listener, serve).run()
