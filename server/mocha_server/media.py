"""Audio out of files of any format, by FFmpeg (through PyAV). Used by the server and by the clients."""

from collections.abc import Callable, Iterator
from typing import IO, Any

import av
import numpy as np

ALONE = {"protocol_whitelist": "none"}
LEAST_RATE = 1000  # Hz; below, one packet of a compressed file is minutes of audio
FORMATS = {b"\x1aE\xdf\xa3": "matroska", b"OggS": "ogg", b"fLaC": "flac"}  # by their first bytes
# What FFmpeg may look at before it gives the first samples; its `nobuffer` would lose what it has looked at.
SOON = {"formatprobesize": str(1 << 15), "analyzeduration": str(100_000)}  # bytes, microseconds
ARRIVING_BYTES = 4096  # asked for at once of what arrives
MADE_UP = ("sbg",)  # formats whose files are texts that say what is to be heard
# PyAV before 19 reads no file whose tags are not UTF-8 unless told to; later ones do, and cannot be told.
TAGS: dict[str, Any] = {"metadata_errors": "replace"} if int(av.__version__.partition(".")[0]) < 19 else {}


class Arriving:
    """A container that is read while it arrives: nothing can be sought in it, and a read gives what is there."""

    def __init__(self, read: Callable[[int], bytes]) -> None:
        """`read` gives up to so many bytes, after waiting for one at least; none at the end."""
        self._read, self._first = read, b""
        self.num_bytes = 0  # read so far

    def read(self, size: int) -> bytes:
        """Up to `size` bytes; called by FFmpeg."""
        first, self._first = self._first[:size], self._first[size:]
        return first or self._more(size)

    def opened(self) -> Any:
        """As `opened`, as soon as can be: formats that the first bytes tell are not looked for."""
        while len(self._first) < 4 and (more := self._more(4 - len(self._first))):
            self._first += more
        return opened(self, SOON, format=FORMATS.get(self._first), buffer_size=ARRIVING_BYTES)

    def _more(self, size: int) -> bytes:
        data = self._read(size)
        self.num_bytes += len(data)
        return data


def opened(file: str | IO[bytes] | Arriving, options: dict[str, str] | None = None, **settings: Any) -> Any:
    """A container to read from. What a file object holds (a playlist, a session description) opens nothing else.

    Raises av.FFmpegError, OSError, ValueError or EOFError: see `av.open`, which is given `options` and `settings`.
    """
    given = ({} if isinstance(file, str) else ALONE) | (options or {})
    container = av.open(file, mode="r", options=given, **TAGS, **settings)
    if container.format.name in MADE_UP:
        container.close()
        raise ValueError(f"a {container.format.name} file has no audio in it")
    return container


def decoded(container: Any, **target: Any) -> Iterator[Any]:
    """The audio of an open file, as frames that `target` describes to FFmpeg's resampler; raises nothing for damage.

    Rate and channels of the file may change in the middle, as where recordings were joined.

    Raises ValueError for a rate that no speech has, av.FFmpegError where memory is missing or FFmpeg cannot mix or
    resample what it decoded.
    """
    resampler, current = None, None
    for frame in map(_mixable, _frames(container)):
        if frame.sample_rate < LEAST_RATE:
            raise ValueError(f"{frame.sample_rate} Hz is no rate of speech")
        found = (frame.format.name, frame.layout.name, frame.sample_rate)
        if found != current:
            if resampler is not None:
                yield from resampler.resample(None)
            resampler, current = av.AudioResampler(**target), found
        assert resampler is not None
        yield from resampler.resample(frame)
    if resampler is not None:
        yield from resampler.resample(None)


def _mixable(frame: Any) -> Any:
    """`frame`, or the mean of its channels where FFmpeg has no name for so many and does not mix them."""
    if not frame.layout.name.endswith("channels"):
        return frame
    interleaved = av.AudioResampler(format="flt", layout=frame.layout).resample(frame)
    samples = np.concatenate([part.to_ndarray()[0] for part in interleaved])
    mean = samples.reshape(-1, frame.layout.nb_channels).mean(axis=1)
    mixed = av.AudioFrame.from_ndarray(mean[None], format="flt", layout="mono")
    mixed.sample_rate = frame.sample_rate
    return mixed


def _frames(container: Any) -> Iterator[Any]:
    """Decoded frames; damaged packets are passed over, a broken end is the end."""
    try:
        for packet in container.demux(audio=0):
            try:
                yield from packet.decode()
            except av.FFmpegError as error:  # decoders have several names for it
                _unless_memory(error)
    except av.FFmpegError as error:
        _unless_memory(error)


def _unless_memory(error: av.FFmpegError) -> None:
    """Nothing, for damage; raises `error` where memory was missing, which no next packet would mend."""
    if isinstance(error, MemoryError):
        raise error
