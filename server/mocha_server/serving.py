"""How the application is put on a socket: uvicorn set up for very many small messages, in one process or several.

No routes, no model.
"""

import asyncio
import socket
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from mocha_model.allocator import keep_memory
from mocha_server.protocols.live import LEFT, SLOW_S
from mocha_server.workers import Handed, Workers

READ_AHEAD = 4  # messages a connection may have waiting before its socket is left unread
READ_AHEAD_BYTES = 1 << 16  # of a message; one that is larger is the last to wait
BACKLOG = 2048


class ReadAhead(WebSocketsSansIOProtocol):
    """uvicorn's WebSockets, but reading pauses after a few messages instead of after each: two system calls less.

    And nobody waits for ever for a client that does not read, or works for one that has left.
    """

    last: asyncio.TimerHandle | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        if self.last is not None:
            self.last.cancel()
        if hasattr(self, "scope"):  # else before the handshake
            self.scope["extensions"][LEFT] = {}
        super().connection_lost(exc)

    def send_receive_event_to_app(self) -> None:
        """Queue the message at hand for the application."""
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
        try:
            async with asyncio.timeout(None if self.writable.is_set() else SLOW_S):
                await super().send(message)
        except TimeoutError:
            self.transport.abort()
            raise ClientDisconnected from None
        if message["type"] == "websocket.close":
            self.last = self.loop.call_later(SLOW_S, self.transport.abort)  # what it has not read then is lost
        if message["type"] == "websocket.http.response.body":
            self.handshake_complete = True


def server(app: FastAPI) -> uvicorn.Server:
    """A server of `app`, to be run on a socket.

    Messages are not compressed: they are small, and a compressor costs more memory than all else of a stream. A pong
    may take its time: that of a client which sends faster than real time waits behind all the audio it has written.
    Clients that are gone are found by `Settings.idle_s`. The event loop is asyncio's own: `Handed` needs one that
    accepts in Python.
    """
    config = uvicorn.Config(
        app, log_level="warning", loop="asyncio", ws=ReadAhead, ws_per_message_deflate=False, ws_ping_timeout=None
    )
    return uvicorn.Server(config)


def run(app: FastAPI, host: str, port: int, workers: int) -> None:
    """Serve until interrupted, with `workers` processes forked from this one, so that they share its weights.

    Raises OSError if the address cannot be used.
    """
    keep_memory()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    if workers == 1:
        server(app).run([listener])
        return

    def serve(place: int, handed: Handed) -> None:
        app.state.metrics.become(place)
        server(app).run([handed])

    Workers(workers, listener, serve).run()
