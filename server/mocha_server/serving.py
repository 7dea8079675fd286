"""How the application is put on a socket: uvicorn set up for very many small messages, in one process or several.

No routes, no model.
"""

import ctypes
import gc
import logging
import os
import signal
import socket
import time
from types import FrameType

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

log = logging.getLogger(__name__)
READ_AHEAD = 4  # messages a connection may have waiting before its socket is left unread
BACKLOG = 2048
PAUSE_S = 1.0  # before a dead worker is replaced, so that one that cannot live does not busy the machine
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # of glibc's mallopt


class ReadAhead(WebSocketsSansIOProtocol):
    """uvicorn's WebSockets, but reading pauses after a few messages instead of after each: two system calls less."""

    def send_receive_event_to_app(self) -> None:
        """Queue the message at hand for the application."""
        reads_on = not self.read_paused and self.queue.qsize() < READ_AHEAD
        if reads_on:
            self.read_paused = True  # as far as the base class can see
        super().send_receive_event_to_app()
        if reads_on:
            self.read_paused = False


def server(app: FastAPI) -> uvicorn.Server:
    """A server of `app`, to be run on a socket.

    Messages are not compressed: they are small, and a compressor costs more memory than all else of a stream. A pong
    may take its time: that of a client which sends faster than real time waits behind all the audio it has written.
    Clients that are gone are found by `Settings.idle_s`.
    """
    config = uvicorn.Config(app, log_level="warning", ws=ReadAhead, ws_per_message_deflate=False, ws_ping_timeout=None)
    return uvicorn.Server(config)


def run(app: FastAPI, host: str, port: int, workers: int) -> None:
    """Serve until interrupted, with `workers` processes forked from this one, so that they share its weights.

    Raises OSError if the address cannot be used.
    """
    keep_memory()
    listeners = listen(host, port, workers)
    if workers == 1:
        server(app).run(listeners)
        return
    gc.collect()
    gc.freeze()  # so that the children's collections do not copy what they share
    Workers(app, listeners).run()


def listen(host: str, port: int, count: int) -> list[socket.socket]:
    """`count` sockets on one port, among which the kernel spreads connections."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listeners: list[socket.socket] = []
    for _ in range(count):
        port = listeners[0].getsockname()[1] if listeners else port
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG, reuse_port=count > 1)
        listeners.append(listener)
    return listeners


class Workers:
    """A process for each listener; one that dies is replaced, and all are ended when this one is asked to end."""

    def __init__(self, app: FastAPI, listeners: list[socket.socket]) -> None:
        self._app, self._listeners = app, listeners
        self._places: dict[int, int] = {}  # by process id
        self._stopping = False

    def run(self) -> None:
        """Until SIGINT or SIGTERM."""
        for place in range(len(self._listeners)):
            self._start(place)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._stop)
        while self._places:
            pid, status = os.wait()
            place = self._places.pop(pid)
            if not self._stopping:
                log.error("worker %d died with status %d; another takes its place", pid, status)
                time.sleep(PAUSE_S)
            if not self._stopping:
                self._start(place)

    def _start(self, place: int) -> None:
        pid = os.fork()
        if pid:
            self._places[pid] = place
            return
        status = 1
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            self._app.state.metrics.become(place)
            server(self._app).run([self._listeners[place]])
            status = 0
        except KeyboardInterrupt:
            status = 0
        finally:
            os._exit(status)  # nothing of the parent is this process's to clean up

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._stopping = True
        for pid in self._places:
            os.kill(pid, signal.SIGTERM)


def keep_memory() -> None:
    """Tell glibc to keep what is freed: giving it back and asking again costs a fifth of each model step.

    All threads share one heap, since only the first heap of a process is kept: others lose what is free at their ends.
    """
    try:
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(M_TRIM_THRESHOLD, -1)
        libc.mallopt(M_ARENA_MAX, 1)
    except (OSError, AttributeError):  # another C library
        return
