"""Several processes that serve one port: the first accepts, each connection goes to the process that has the fewest.

No routes, no model, no event loop.
"""

import errno
import logging
import mmap
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

log = logging.getLogger(__name__)
PAUSE_S = 1.0  # before a dead worker is replaced, so that one that cannot live does not busy the machine
POLL_S = 0.5  # how often dead workers are looked for
SIGN = b"+"
ENDING = (signal.SIGINT, signal.SIGTERM)
NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Seldom:
    """A warning that clients may cause as often as they like, and that is logged once a minute."""

    def __init__(self, message: str) -> None:
        self._message, self._due_s = message, 0.0

    def warn(self) -> None:
        """Log it, unless it was just logged."""
        if time.monotonic() >= self._due_s:
            self._due_s = time.monotonic() + 60
            log.warning(self._message)


TOO_MANY_FILES = Seldom("no more connections for now: too many files are open (see `ulimit -n`)")


class Listener(socket.socket):
    """A listening socket. Where there is no room, asyncio pauses for a second: but first it asks 2047 times more."""

    _failed = False

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection; raises OSError."""
        if self._failed:
            self._failed = False
            raise BlockingIOError  # which ends its questions
        try:
            return super().accept()
        except OSError as error:
            self._failed = error.errno in NO_ROOM
            raise


class Connection(socket.socket):
    """A client's connection that says when it is closed."""

    on_close: Callable[[], None]

    def close(self) -> None:
        """As any socket; twice is the same as once."""
        if self.fileno() != -1:
            self.on_close()
        super().close()


class Handed(socket.socket):
    """A worker's end of the pipe by which it gets connections; an event loop may take it for a listening socket."""

    on_close: Callable[[], None]  # called for each connection that ends

    def listen(self, backlog: int = 0, /) -> None:
        """Say that the worker is ready; called when its event loop begins to accept."""
        with suppress(OSError):  # there is nobody: `accept` finds out
            self.send(SIGN)

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection; without the process that hands them over, this one ends too."""
        sign, descriptors, _, _ = socket.recv_fds(self, 1, 1)
        if not sign:
            signal.raise_signal(signal.SIGTERM)
            raise ConnectionAbortedError("nobody hands over connections any more")
        if not descriptors:  # this process has too many files open
            TOO_MANY_FILES.warn()
            self.on_close()
            raise ConnectionAbortedError("the connection was lost")
        connection = Connection(fileno=descriptors[0])
        connection.on_close = self.on_close
        try:
            return connection, connection.getpeername()
        except OSError as error:  # the client is gone
            connection.close()
            raise ConnectionAbortedError(str(error)) from error


@dataclass(eq=False)
class Worker:
    """A process, the pipe to it, and how many connections went through."""

    place: int
    pid: int
    pipe: socket.socket
    ready: bool = False
    handed: int = 0


class Workers:
    """`count` processes; one that dies is replaced, and all end when this one is asked to end."""

    def __init__(self, count: int, listener: socket.socket, serve: Callable[[int, Handed], None]) -> None:
        """Each worker calls `serve` with its number and a socket to accept from; it returns when asked to end."""
        self._count, self._listener, self._serve = count, listener, serve
        self._closed = memoryview(mmap.mmap(-1, 8 * count)).cast("q")  # connections that each worker has seen end
        self._workers: list[Worker] = []
        self._due: dict[int, float] = {}  # when the worker of a place is to be started again
        self._stopping = self._served = False
        self._died = 0  # before any was ready

    def run(self) -> None:
        """Until SIGINT or SIGTERM; raises SystemExit where as many as there are die before any was ready."""
        for number in ENDING:
            signal.signal(number, self._stop)
        for place in range(self._count):
            self._start(place)
        self._listener.setblocking(False)
        while not self._stopping:
            self._replace_dead()
            self._pass_on()
        self._listener.close()
        for worker in self._workers:
            os.kill(worker.pid, signal.SIGTERM)
        for worker in self._workers:
            os.waitpid(worker.pid, 0)
        if self._died >= self._count:
            raise SystemExit(1)

    def _start(self, place: int) -> None:
        ours, theirs = socket.socketpair()
        self._closed[place] = 0
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)  # or the child could take its first one for its parent's
        pid = os.fork()
        if pid:
            theirs.close()
            ours.setblocking(False)
            self._workers.append(Worker(place, pid, ours))
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
            return
        status = 1
        try:
            for number in ENDING:
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
            for unused in (self._listener, ours, *(other.pipe for other in self._workers)):
                unused.close()
            handed = Handed(fileno=theirs.detach())
            handed.on_close = lambda: self._count_closed(place)
            self._serve(place, handed)
            status = 0
        except Exception:
            log.exception("a worker failed")
        finally:
            os._exit(status)  # nothing of the parent is this process's to clean up

    def _replace_dead(self) -> None:
        now, workers = time.monotonic(), {worker.pid: worker for worker in self._workers}
        for pid, status in _dead():
            if worker := workers.get(pid):
                self._died += not self._served
                self._stopping |= self._died >= self._count
                then = "none has served yet" if self._stopping else "another takes its place"
                log.error("worker %d died with status %d; %s", pid, os.waitstatus_to_exitcode(status), then)
                self._workers.remove(worker)
                worker.pipe.close()
                self._due[worker.place] = now + PAUSE_S
        for place in [place for place, due in self._due.items() if due <= now]:
            del self._due[place]
            self._start(place)

    def _pass_on(self) -> None:
        """Wait for connections, if anybody could take them, and hand them over."""
        waited_for: list[socket.socket] = [worker.pipe for worker in self._workers if not worker.ready]
        if len(waited_for) < len(self._workers):
            waited_for.append(self._listener)
        readable = select.select(waited_for, [], [], POLL_S)[0]
        for worker in self._workers:
            if worker.pipe in readable:
                with suppress(OSError):  # dead
                    worker.ready = worker.pipe.recv(1) == SIGN
                    self._served |= worker.ready
        if self._listener in readable:
            with suppress(OSError):  # none left, or that client is gone
                while not self._stopping:
                    self._hand_over(self._listener.accept()[0])

    def _hand_over(self, connection: socket.socket) -> None:
        """To the ready worker with the fewest connections."""
        load = {worker: worker.handed - self._closed[worker.place] for worker in self._workers if worker.ready}
        with connection:
            for worker in sorted(load, key=lambda worker: load[worker]):
                try:
                    socket.send_fds(worker.pipe, [SIGN], [connection.fileno()])
                except OSError:  # it takes no more, or is no more
                    continue
                worker.handed += 1
                return

    def _count_closed(self, place: int) -> None:
        """Called in the worker."""
        self._closed[place] += 1

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._stopping = True


def _dead() -> Iterator[tuple[int, int]]:
    """Which children have died, and their status; the first process of a container is given those of its workers."""
    with suppress(ChildProcessError):  # there is none
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            yield found
