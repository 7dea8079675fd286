"""Samples on their way into a step: taken from the front of a stream's blocks, and stacked into rows."""

from collections import deque

import numpy as np
from numpy.typing import NDArray

from mocha_server.audio import Float, Samples, as_float


def take_front(blocks: deque[Samples], num_samples: int) -> Samples:
    """Remove `num_samples` from the front of `blocks`, which have at least so many."""
    parts, missing = [], num_samples
    while missing:
        block = blocks.popleft()
        if len(block) > missing:
            blocks.appendleft(block[missing:])
            block = block[:missing]
        parts.append(block)
        missing -= len(block)
    if len(parts) == 1:
        return parts[0]
    if len({part.dtype for part in parts}) == 1 and parts[0].dtype == np.int16:
        raw: NDArray[np.int16] = np.concatenate(parts)
        return raw
    return np.concatenate([as_float(part) for part in parts]) if parts else np.zeros(0, np.float32)


def stack(parts: list[Samples], num_rows: int) -> Float:
    """Rows [num_rows, N] of one array, padded with zeros. What is int16 is converted together."""
    stacked = np.zeros((num_rows, max(map(len, parts))), np.float32)
    whole = np.array([part.dtype == np.int16 for part in parts])
    for into, part in zip(stacked, parts, strict=False):
        into[: len(part)] = part
    stacked[: len(parts)][whole] /= np.float32(32768)
    return stacked
