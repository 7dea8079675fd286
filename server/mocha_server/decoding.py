"""Audio files decoded in processes of their own: what FFmpeg makes of a file ends nothing but that file.

The first file starts a helper that has loaded FFmpeg; it forks for each file, which takes milliseconds. Where nothing
can fork, files are decoded in threads. Live audio in a container is a file that arrives bit by bit.
"""

import asyncio
import atexit
import gc
import logging
import math
import os
import signal
import socket
import struct
import subprocess
import sys
import traceback
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import IO

import numpy as np

from mocha_server.audio import AudioError, Float, Samples, decode_arriving, decode_file
from mocha_server.messages import ErrorCode
from mocha_server.stream import EngineError

with suppress(ImportError):  # where nothing can fork
    import resource

log = logging.getLogger(__name__)
MOST_BYTES = 1 << 28  # of memory that decoding a file may take
MOST_S = 10  # of computing that its next block may take
IN_MEMORY_BYTES = 1 << 20  # of files that are not written to a disk for this
READY = b"+"
REQUEST = struct.Struct("=I?")  # the rate of the samples, and whether the file arrives bit by bit
SAMPLES, READ, REFUSED, END = b"s", b"n", b"r", b"e"
HEADER = struct.Struct("=cI")  # what follows, and how many bytes of it
COUNT = struct.Struct("=Q")  # of the bytes that have been read, of a file that arrives


async def decode_apart(file: IO[bytes], to_rate: int) -> AsyncGenerator[Samples, None]:
    """As `audio.decode_file`; raises AudioError also where the process that decodes `file` dies, of whatever cause.

    Raises EngineError where there can be no such process.
    """
    if not hasattr(os, "fork"):
        async for block in in_threads(decode_file(file, to_rate)):
            yield block
        return
    answers, pipe = asyncio.StreamReader(), _asked(file, to_rate)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(answers), pipe
    )
    try:
        while (answer := await _next(answers))[0] == SAMPLES:
            yield np.frombuffer(answer[1], np.float32)
    finally:
        transport.close()


class ArrivingDecoder:
    """Audio in a container, decoded as it arrives, in a process of its own that ends when this is closed.

    What is pushed is read at once, and all that can be decoded of it is given before more is taken: so neither side
    ever waits for the other to read, and how the container is cut changes nothing.
    """

    def __init__(self, to_rate: int) -> None:
        self._to_rate, self._num_bytes, self._ended = to_rate, 0, False
        self._ends: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def push(self, data: bytes) -> AsyncGenerator[bytes, None]:
        """The float32 samples that the next bytes lead to; what follows a container's end is passed over.

        Raises AudioError also where the process dies, EngineError where there can be none.
        """
        if not data or self._ended:
            return
        if self._ends is None:
            ours = _arriving(self._to_rate)
            self._ends = await asyncio.open_unix_connection(sock=ours)
        self._num_bytes += len(data)
        self._ends[1].write(data)
        async for samples in self._answers(COUNT.pack(self._num_bytes)):
            yield samples

    async def finish(self) -> AsyncGenerator[bytes, None]:
        """The rest of the samples; raises what `push` raises."""
        if self._ends is not None and not self._ended:
            self._ends[1].write_eof()
            async for samples in self._answers():
                yield samples

    def close(self) -> None:
        """End the process, if there is one."""
        self._ended = True
        if self._ends is not None:
            self._ends[1].transport.abort()

    async def _answers(self, until_read: bytes | None = None) -> AsyncGenerator[bytes, None]:
        """Samples, until so much is read, or to the container's end."""
        assert self._ends is not None
        while not self._ended:
            try:
                kind, content = await _next(self._ends[0])
            except (AudioError, EngineError):
                self.close()
                raise
            if kind == SAMPLES:
                yield content
            elif kind == END:
                self.close()
            elif content == until_read:
                return


async def in_threads(blocks: Iterator[Samples]) -> AsyncGenerator[Samples, None]:
    """The same blocks; each is computed beside the event loop."""
    while (block := await asyncio.to_thread(next, blocks, None)) is not None:
        yield block


async def _next(answers: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """What kind of answer is next, and its content; raises AudioError, or EngineError."""
    try:
        kind, num_bytes = HEADER.unpack(await answers.readexactly(HEADER.size))
        content = await answers.readexactly(num_bytes)
    except (asyncio.IncompleteReadError, ConnectionError):
        if not _helper.has_begun():
            raise EngineError(ErrorCode.INTERNAL, "the server cannot decode files") from None
        raise AudioError(ErrorCode.UNSUPPORTED_MEDIA, "the file breaks its decoder") from None
    if kind == REFUSED:
        code, _, why = content.decode().partition(" ")
        raise AudioError(ErrorCode(code), why)
    return kind, content


def _asked(file: IO[bytes], to_rate: int) -> IO[bytes]:
    """Where the samples of `file` come from; raises EngineError. Takes a millisecond, but for the first file some."""
    try:
        with open(_descriptor(file), "rb") as read:
            reading, writing = os.pipe()
            answers = open(reading, "rb", buffering=0)  # noqa: SIM115
            with open(writing, "wb") as written:
                _helper.send(REQUEST.pack(to_rate, False), [read.fileno(), written.fileno()])
            return answers
    except OSError as error:
        raise _no_process(error) from error


def _arriving(to_rate: int) -> socket.socket:
    """Where a file is sent to as it arrives, and its samples come from; raises EngineError."""
    if not hasattr(os, "fork"):
        raise EngineError(ErrorCode.INTERNAL, "this server cannot decode live audio in containers")
    try:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            _helper.send(REQUEST.pack(to_rate, True), [theirs.fileno(), theirs.fileno()])
            return socket.socket(fileno=ours.detach())
    except OSError as error:
        raise _no_process(error) from error


def _no_process(error: OSError) -> EngineError:
    log.error("a file could not be given to a process that decodes it: %s", error)
    return EngineError(ErrorCode.SERVER_FULL, "no file can be decoded now: try again later")


def _descriptor(file: IO[bytes]) -> int:
    """A new one of `file`, or of a copy in memory."""
    if file.seek(0, os.SEEK_END) > IN_MEMORY_BYTES or not hasattr(os, "memfd_create"):
        return os.dup(file.fileno())
    file.seek(0)
    descriptor = os.memfd_create("audio")
    with open(descriptor, "wb", closefd=False) as copy:
        copy.write(file.read())
    return descriptor


class _Helper:
    """The process that forks, started when it is first needed; if it died, or stands still, another takes its place.

    It ends when it is closed, or its server ends.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._begun = False

    def send(self, request: bytes, descriptors: list[int]) -> None:
        """Have a file decoded: what it is read from, and what its samples are written to. Raises OSError."""
        with self._lock:
            if self._socket is not None:
                with suppress(OSError):
                    socket.send_fds(self._socket, [request], descriptors)
                    return
                self.close()
            self._socket = self._started()
            socket.send_fds(self._socket, [request], descriptors)

    def has_begun(self) -> bool:
        """Whether it got as far as to take requests."""
        with self._lock, suppress(OSError):
            self._begun = self._begun or (self._socket is not None and self._socket.recv(1) == READY)
        return self._begun

    def close(self) -> None:
        """End it, if there is one; what it has begun to decode goes on."""
        if self._socket is not None and self._process is not None:
            self._socket.close()
            self._process.kill()
            self._process.wait()

    def _started(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        path = os.pathsep.join(filter(None, sys.path))
        environment = os.environ | {"PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"}  # threads do not outlive a fork
        with theirs:
            command = [sys.executable, "-P", "-m", __name__, str(theirs.fileno())]  # not from where it is started
            fds = [theirs.fileno()]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment, pass_fds=fds)
        self._begun = False
        return ours


_helper = _Helper()
atexit.register(_helper.close)


def _serve(requests: socket.socket) -> None:
    """Fork for each request, until nobody is there to send any."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):  # meant for the server; children leave nothing
        signal.signal(number, signal.SIG_IGN)
    gc.freeze()
    requests.send(READY)
    while True:
        try:
            request, descriptors, _, _ = socket.recv_fds(requests, REQUEST.size, 2)
        except ConnectionError:  # the server ended before it read that this process is ready
            return
        if not request:
            return
        if len(descriptors) == 2 and _forked():
            requests.close()
            try:
                _decode(*REQUEST.unpack(request), *descriptors)
            except Exception:
                traceback.print_exc()
            os._exit(0)  # ending as Python does would take longer than all before
        for descriptor in descriptors:
            os.close(descriptor)


def _forked() -> bool:
    """Whether this is the new process."""
    try:
        return os.fork() == 0
    except OSError as error:
        print(f"there can be no process to decode a file: {error}", file=sys.stderr)
        return False


def _decode(to_rate: int, arrives: bool, reading: int, writing: int) -> None:
    """Decode one file, in a process that ends with it."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # where memory ends, this process does first
    with suppress(ValueError, OSError):  # where the system knows no such limits
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
    _allow_time()
    with open(writing, "wb") as answers:

        def say(kind: bytes, content: bytes = b"") -> None:
            with _unless_left():
                answers.write(HEADER.pack(kind, len(content)) + content)
                answers.flush()

        try:
            for block in _arrived(reading, say, to_rate) if arrives else _read(reading, to_rate):
                say(SAMPLES, block.tobytes())
                _allow_time()
            say(END)
        except AudioError as error:
            say(REFUSED, f"{error.code.value} {error}".encode())


def _read(descriptor: int, to_rate: int) -> Iterator[Float]:
    """The samples of a file."""
    with open(descriptor, "rb") as file:
        file.seek(0)
        yield from decode_file(file, to_rate)


def _arrived(descriptor: int, say: Callable[[bytes, bytes], None], to_rate: int) -> Iterator[Float]:
    """The samples of a file that arrives; who sends it is told how much was read whenever more is wanted."""
    num_bytes = 0
    with open(descriptor, "rb", buffering=0) as file:

        def read(size: int) -> bytes:
            nonlocal num_bytes
            say(READ, COUNT.pack(num_bytes))
            with _unless_left():
                data = file.read(size)
            num_bytes += len(data)
            return data

        yield from decode_arriving(read, to_rate)


@contextmanager
def _unless_left() -> Iterator[None]:
    """End this process at once where nobody waits for it."""
    try:
        yield
    except ConnectionError:
        os._exit(0)


def _allow_time() -> None:
    """Have this process end where it computes for `MOST_S` more."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    until = math.ceil(used.ru_utime + used.ru_stime) + MOST_S
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CPU, (until, resource.RLIM_INFINITY))


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
