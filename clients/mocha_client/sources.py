"""Where audio comes from: files, pipes, a microphone. All give bytes in pieces.

Files are decoded to 16 kHz mono s16le, and so is the microphone; raw audio is passed on as it is.
"""

import asyncio
import contextlib
import logging
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import IO, Any, BinaryIO

import av

from mocha_server.media import decoded, opened
from mocha_server.messages import Encoding, Start

log = logging.getLogger(__name__)
DECODED = Start(sample_rate=16_000, encoding=Encoding.PCM_S16LE, channels=1)
PIPE_BYTES = 4096  # asked of a pipe at once: small, so that live audio does not wait to be complete
PIECES_AHEAD = 4
WAITING_S = 60  # of the microphone: longer than `StreamingClient` tries to replace a lost connection


class SourceError(RuntimeError):
    """Audio that cannot be read; the message says what and why."""


def piece_bytes(start: Start, chunk_ms: int) -> int:
    """Bytes of `chunk_ms`, whole samples."""
    return start.sample_rate * chunk_ms // 1000 * start.encoding.sample_bytes * start.channels


def decoded_pieces(path: str | IO[bytes], chunk_ms: int) -> Iterator[bytes]:
    """Pieces of `chunk_ms` of any audio file (a path, "-" for standard input, an open file); raises SourceError."""
    size = piece_bytes(DECODED, chunk_ms)
    held, some = bytearray(), False
    try:
        with opened(_standard_input() if path == "-" else path, buffer_size=PIPE_BYTES) as container:
            for block in decoded(container, format="s16", layout="mono", rate=DECODED.sample_rate):
                some = True
                held += block.to_ndarray().tobytes()
                while len(held) >= size:
                    yield bytes(held[:size])
                    del held[:size]
    except IndexError as error:
        raise SourceError(f"{path}: there is no audio in it; without a header it needs --encoding") from error
    except (av.FFmpegError, OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise SourceError(f"{path}: not readable as audio ({why}); without a header it needs --encoding") from error
    if not some:
        pipe = ": formats with their index at the end, such as m4a, cannot be read from a pipe" if path == "-" else ""
        raise SourceError(f"{path}: no audio could be decoded{pipe}")
    if held:
        yield bytes(held)


def raw_pieces(path: str, chunk_ms: int, start: Start) -> Iterator[bytes]:
    """The bytes of a file or of standard input as they are, up to `chunk_ms` in a piece; raises SourceError."""
    size = piece_bytes(start, chunk_ms)
    try:
        with contextlib.ExitStack() as stack:
            file = _standard_input() if path == "-" else stack.enter_context(open(path, "rb", buffering=0))
            while piece := file.read(size):
                yield piece
    except OSError as error:
        raise SourceError(f"{path}: cannot be read ({error})") from error


def _standard_input() -> BinaryIO:
    """Unbuffered: a read gives what is there instead of waiting for all that was asked. Raises OSError."""
    if sys.stdin is None:
        raise OSError("standard input is closed")
    return open(sys.stdin.fileno(), "rb", buffering=0, closefd=False)


@contextlib.contextmanager
def on_interruption(do: Callable[[], None]) -> Iterator[None]:
    """Let the first Ctrl-C `do` something; a second one interrupts as ever, and so does one where loops take none."""
    loop = asyncio.get_running_loop()

    def interrupted() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        do()

    with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):  # of systems, or outside the main thread
        loop.add_signal_handler(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            loop.remove_signal_handler(signal.SIGINT)


async def read_aside(pieces: Iterator[bytes], interrupted: asyncio.Event | None = None) -> AsyncIterator[bytes]:
    """Pieces read in a thread of their own, as reading may wait for a pipe while text arrives.

    Ctrl-C ends them as if there were no more, and sets `interrupted` if that is given.
    """
    loop, queue = asyncio.get_running_loop(), asyncio.Queue[bytes | Exception | None]()
    room, gone = threading.Semaphore(PIECES_AHEAD), threading.Event()

    def put(item: bytes | Exception | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(queue.put_nowait, item)

    def read() -> None:
        try:
            room.acquire()
            for piece in pieces:
                put(piece)
                room.acquire()  # before more is read: what was read is never held back from a listener who ends
                if gone.is_set():
                    return
        except Exception as error:  # whatever it is, the listener must not wait for ever
            put(error)
        else:
            put(None)

    def end() -> None:
        assert interrupted is not None
        interrupted.set()
        queue.put_nowait(None)

    threading.Thread(target=read, daemon=True).start()
    try:
        with on_interruption(end) if interrupted else contextlib.nullcontext():
            while (item := await queue.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
                room.release()
    finally:
        gone.set()
        room.release()


class Waiting:
    """Pieces from the microphone that are not sent yet; those beyond `WAITING_S` of speech are lost, and told."""

    def __init__(self, chunk_ms: int) -> None:
        self._chunk_ms = chunk_ms
        self._pieces = asyncio.Queue[bytes | None]()  # bounded by `keep`
        self._num_lost = 0

    def keep(self, piece: bytes) -> None:
        """Add a piece. A server that cannot follow loses the newest audio rather than all memory."""
        if self._pieces.qsize() < max(1, WAITING_S * 1000 // self._chunk_ms):
            self._pieces.put_nowait(piece)
            return
        if not self._num_lost:
            log.warning("the server is away or cannot follow: what is said now is lost")
        self._num_lost += 1

    def end(self) -> None:
        """There is nothing to come."""
        self._pieces.put_nowait(None)

    async def given(self) -> AsyncIterator[bytes]:
        """All that was kept, until the end."""
        while (piece := await self._pieces.get()) is not None:
            yield piece
        if self._num_lost:
            lost_s = self._num_lost * self._chunk_ms / 1000
            log.warning("%.1f s of speech were lost, as the server was away or could not follow", lost_s)


async def microphone_pieces(chunk_ms: int) -> AsyncIterator[bytes]:
    """The default microphone until Ctrl-C (a second one interrupts as ever), or until it vanishes, which is told.

    Raises SourceError where there is none.
    """
    try:
        import sounddevice
    except (ImportError, OSError) as error:
        raise SourceError(
            'the microphone needs sounddevice, which comes with the extra "microphone" of mocha-asr, and PortAudio'
        ) from error
    loop, waiting = asyncio.get_running_loop(), Waiting(chunk_ms)

    def heard(data: Any, frames: int, time: Any, status: Any) -> None:
        loop.call_soon_threadsafe(waiting.keep, bytes(data))

    closing = threading.Event()

    def finished() -> None:
        if not closing.is_set():
            loop.call_soon_threadsafe(gone)

    def gone() -> None:
        log.warning("the microphone is gone")
        waiting.end()

    rate = DECODED.sample_rate
    try:
        with contextlib.ExitStack() as device:

            def stop() -> None:
                device.close()
                loop.call_soon(waiting.end)  # after what was `heard` until then

            device.enter_context(
                sounddevice.RawInputStream(
                    rate,
                    rate * chunk_ms // 1000,
                    channels=1,
                    dtype="int16",
                    callback=heard,
                    finished_callback=finished,
                )
            )
            device.callback(closing.set)  # before it is closed
            with on_interruption(stop):
                async for piece in waiting.given():
                    yield piece
    except sounddevice.PortAudioError as error:
        raise SourceError(f"no microphone can be opened ({error})") from error
