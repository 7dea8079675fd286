"""Audio out of files of any format, by FFmpeg (through PyAV). Used by the server and by the clients."""

from collections.abc import Iterator
from typing import Any

import av


def decoded(container: Any, **target: Any) -> Iterator[Any]:
    """The audio of an open file, as frames that `target` describes to FFmpeg's resampler; raises nothing for damage.

    Rate and channels of the file may change in the middle, as where recordings were joined.
    """
    resampler, current = None, None
    for frame in _frames(container):
        found = (frame.format.name, frame.layout.name, frame.sample_rate)
        if found != current:
            if resampler is not None:
                yield from resampler.resample(None)
            resampler, current = av.AudioResampler(**target), found
        assert resampler is not None
        yield from resampler.resample(frame)
    if resampler is not None:
        yield from resampler.resample(None)


def _frames(container: Any) -> Iterator[Any]:
    """Decoded frames; damaged packets are passed over, a broken end is the end."""
    try:
        for packet in container.demux(audio=0):
            try:
                yield from packet.decode()
            except av.InvalidDataError:
                continue
    except av.FFmpegError:
        pass
