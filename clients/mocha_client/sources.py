"""Where audio comes from: files, a pipe, a microphone. All give 16 kHz mono s16le bytes in pieces."""

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from itertools import chain
from typing import IO, Any

import av

RATE = 16_000
BYTES_PER_MS = RATE * 2 // 1000


class SourceError(RuntimeError):
    """Audio that cannot be read; the message says what and why."""


def file_pieces(path: str | IO[bytes], chunk_ms: int) -> Iterator[bytes]:
    """Decode any audio file (a path, "-" for standard input, or an open file) into pieces of `chunk_ms`."""
    size = chunk_ms * BYTES_PER_MS
    held = bytearray()
    try:
        with av.open(sys.stdin.buffer if path == "-" else path, mode="r") as container:
            resampler = av.AudioResampler(format="s16", layout="mono", rate=RATE)
            for frame in chain(container.decode(audio=0), [None]):
                for block in resampler.resample(frame):
                    held += block.to_ndarray().tobytes()
                while len(held) >= size:
                    yield bytes(held[:size])
                    del held[:size]
    except (av.FFmpegError, OSError, IndexError) as error:
        raise SourceError(f"{path}: not readable as audio ({error})") from error
    if held:
        yield bytes(held)


async def microphone_pieces(chunk_ms: int) -> AsyncIterator[bytes]:
    """The default microphone until the caller stops; raises SourceError where there is none."""
    try:
        import sounddevice
    except (ImportError, OSError) as error:
        raise SourceError(
            'the microphone needs sounddevice: pip install "mocha-asr[microphone]", and PortAudio'
        ) from error
    loop, pieces = asyncio.get_running_loop(), asyncio.Queue[bytes](500)

    def heard(data: Any, frames: int, time: Any, status: Any) -> None:
        loop.call_soon_threadsafe(keep, bytes(data))

    def keep(data: bytes) -> None:
        if not pieces.full():  # a server that cannot follow loses the newest audio rather than all memory
            pieces.put_nowait(data)

    try:
        with sounddevice.RawInputStream(RATE, RATE * chunk_ms // 1000, channels=1, dtype="int16", callback=heard):
            while True:
                yield await pieces.get()
    except sounddevice.PortAudioError as error:
        raise SourceError(f"no microphone can be opened ({error})") from error
