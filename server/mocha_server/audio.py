"""What clients send to mono float32 at the model's rate: raw encodings in pieces of any size, and audio files.

Resampling and file formats are FFmpeg's (through PyAV). How the bytes were cut never changes the samples.
"""

import math
from collections.abc import Callable, Generator, Iterator
from typing import IO, Any

import av
import numpy as np
from numpy.typing import NDArray

from mocha_server.media import Arriving, decoded, opened
from mocha_server.messages import Encoding, ErrorCode

Samples = NDArray[np.float32] | NDArray[np.int16]  # float32 in [-1, 1], or int16 as it came: see `as_float`
Float = NDArray[np.float32]
LEAST_S, LEAST_BYTES_PER_S = 300, 5  # audio that few bytes may be, and of more: silence takes the least
UNREADABLE = (av.FFmpegError, MemoryError, ValueError, EOFError)  # what opening a file may raise
BLOCK_SAMPLES = 1024  # resampler input; fixed blocks make its output independent of how the audio arrived


def as_float(samples: Samples) -> Float:
    """Samples as float32. int16 stays as it is until many streams are converted together, off the event loop."""
    if samples.dtype == np.int16:
        return samples.astype(np.float32) / np.float32(32768)
    return samples.astype(np.float32, copy=False)


class AudioError(ValueError):
    """Audio that cannot be used; `code` says why, for programs."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


def _table(codec: str) -> Float:
    """What each byte of a `codec` of ITU-T G.711 stands for, [256]."""
    decoder = av.CodecContext.create(codec, "r")
    assert isinstance(decoder, av.AudioCodecContext)
    decoder.sample_rate, decoder.layout = 8000, "mono"
    (frame,) = decoder.decode(av.Packet(bytes(range(256))))
    return as_float(frame.to_ndarray()[0])


MULAW, ALAW = _table("pcm_mulaw"), _table("pcm_alaw")


class Resampler:
    """Mono from one rate to another, streaming; float32 comes out unless the rates are the same."""

    def __init__(self, from_rate: int, to_rate: int) -> None:
        self._rates = (from_rate, to_rate)
        self._held = np.zeros(0, np.float32)
        self._av = None
        if from_rate != to_rate:
            self._av = av.AudioResampler(format="flt", layout="mono", rate=to_rate)

    def push(self, samples: Samples) -> Samples:
        """What is ready after `samples` [N]; up to `BLOCK_SAMPLES` and the filter's length are held back."""
        if self._av is None:
            return samples
        self._held = np.concatenate([self._held, as_float(samples)])
        whole = len(self._held) // BLOCK_SAMPLES * BLOCK_SAMPLES
        blocks, self._held = self._held[:whole], self._held[whole:]
        return _joined([self._run(block) for block in blocks.reshape(-1, BLOCK_SAMPLES)])

    def finish(self) -> Samples:
        """The rest."""
        if self._av is None:
            return self._held
        last = [self._run(self._held)] if len(self._held) else []
        self._held = np.zeros(0, np.float32)
        return _joined([*last, self._run(None)])

    def _run(self, block: Float | None) -> Float:
        assert self._av is not None
        frame = None
        if block is not None:
            frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(block)[None], format="flt", layout="mono")
            frame.sample_rate = self._rates[0]
        return _joined([f.to_ndarray()[0] for f in self._av.resample(frame)])


def _joined(parts: list[Any]) -> Float:
    return np.concatenate(parts) if parts else np.zeros(0, np.float32)


class RawDecoder:
    """Bytes of an `Encoding` in pieces of any size to mono samples at `to_rate`."""

    def __init__(self, encoding: Encoding, sample_rate: int, channels: int, to_rate: int) -> None:
        self._encoding, self._channels = encoding, channels
        self._frame_bytes = encoding.sample_bytes * channels
        self._carry = b""
        self.dangling = 0  # bytes of an incomplete last sample, after `finish`
        self._resampler = Resampler(sample_rate, to_rate)

    def push(self, data: bytes) -> Samples:
        """Decode what is complete; raises AudioError for values that are no audio."""
        data = self._carry + data
        whole = len(data) // self._frame_bytes * self._frame_bytes
        self._carry = data[whole:]
        return self._resampler.push(self._decode(data[:whole]))

    def finish(self) -> Samples:
        """The rest; `dangling` bytes of an incomplete last sample are left out."""
        self.dangling, self._carry = len(self._carry), b""
        return self._resampler.finish()

    def _decode(self, data: bytes) -> Samples:
        samples: Float
        if self._encoding is Encoding.PCM_S16LE:
            raw: NDArray[np.int16] = np.frombuffer(data, "<i2")
            if self._channels == 1:
                return raw
            samples = as_float(raw)
        elif self._encoding is Encoding.PCM_F32LE:
            samples = np.frombuffer(data, "<f4").astype(np.float32)
            if not np.isfinite(samples).all():
                raise AudioError(ErrorCode.INVALID_AUDIO, "the audio has samples that are NaN or infinite")
            samples = samples.clip(-1, 1)
        else:
            table = MULAW if self._encoding is Encoding.MULAW else ALAW
            samples = table[np.frombuffer(data, np.uint8)]
        if self._channels == 1:
            return samples
        mixed: Float = samples.reshape(-1, self._channels).mean(axis=1, dtype=np.float32)
        return mixed


def decode_file(file: str | IO[bytes], to_rate: int) -> Iterator[Float]:
    """Samples of any audio or video file FFmpeg reads, block by block; nothing is held whole.

    A file that breaks off yields what could be decoded.

    Raises:
        AudioError: the file is empty, of no audio format, or has no audio in it.
        OSError: there is no such file, or it may not be read.

    """
    try:
        container = opened(file)
    except UNREADABLE as error:
        if isinstance(error, OSError) and isinstance(file, str):  # of the path, though an FFmpegError too
            raise
        raise _unsupported(error, "not a file of a known audio format") from error
    with container:
        if not container.streams.audio:
            raise AudioError(ErrorCode.UNSUPPORTED_MEDIA, "the file has no audio in it")
        size = container.size if container.size > 0 else math.inf
        if not (yield from _samples(container, to_rate, lambda: size, frame_size=to_rate // 2)):
            raise AudioError(ErrorCode.EMPTY_AUDIO, "the file has no audio that can be decoded")


def decode_arriving(read: Callable[[int], bytes], to_rate: int) -> Iterator[Float]:
    """The same samples of a container that arrives, each as soon as FFmpeg gives it.

    `read` gives up to so many bytes, after waiting for one at least; none at the end. Raises AudioError.
    """
    file = Arriving(read)
    try:
        container = file.opened()
    except UNREADABLE as error:
        why = "not audio in a container of a known format; raw audio needs its encoding to be named"
        raise _unsupported(error, why) from error
    with container:
        if not container.streams.audio:
            raise AudioError(ErrorCode.UNSUPPORTED_MEDIA, "there is no audio in the container")
        if not (yield from _samples(container, to_rate, lambda: file.num_bytes)):
            if "mp4" in container.format.name:
                why = "MP4 and M4A with their index at the end cannot be decoded while they arrive"
                raise AudioError(ErrorCode.UNSUPPORTED_MEDIA, why)
            raise AudioError(ErrorCode.EMPTY_AUDIO, "the container has no audio that can be decoded")


def _samples(
    container: Any, to_rate: int, num_bytes: Callable[[], float], **target: Any
) -> Generator[Float, None, bool]:
    """Blocks of samples of an open container, of which `num_bytes` are there, and whether any; raises AudioError."""
    seconds = 0.0
    try:
        for block in decoded(container, format="flt", layout="mono", rate=to_rate, **target):
            seconds += block.samples / to_rate
            if seconds > LEAST_S + num_bytes() / LEAST_BYTES_PER_S:
                raise ValueError("more audio than so few bytes can hold")
            yield np.nan_to_num(block.to_ndarray()[0]).clip(-1, 1)
    except (av.FFmpegError, MemoryError) as error:
        raise _unsupported(error, "audio of a kind that cannot be mixed") from error
    except ValueError as error:
        raise AudioError(ErrorCode.UNSUPPORTED_MEDIA, str(error)) from error
    return seconds > 0


def _unsupported(error: Exception, why: str) -> AudioError:
    """What to raise for `error`, which FFmpeg gives for `why` or because it has not the memory that a file needs."""
    why = "the file needs more memory than speech does" if isinstance(error, MemoryError) else why
    return AudioError(ErrorCode.UNSUPPORTED_MEDIA, why)
