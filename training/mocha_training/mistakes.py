"""What is wrong in a text, and since when: edit distance told symbol by symbol, and costs of a text frame by frame.

Knows nothing of networks.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Costs = NDArray[np.float32]

CHARACTER_COST = 0.25  # of a wrong character, beside 1 of a wrong word, which may have several

_BEYOND = 1e6


@dataclass(frozen=True)
class Texts:
    """Texts of symbols. `ids` is [R, N] int64, of which the first `counts` [R] int64 of each row are the text."""

    ids: Ids
    counts: Ids


def increases(written: Texts, said: Texts) -> Costs:
    """By how much each symbol of `written` makes the distance to `said` longer, float32 [R, N + 1].

    Place i is the least edit distance (Levenshtein 1966) of the first i + 1 symbols from any beginning of what was
    said, less that of the first i. Place ``counts`` is what the end adds, since then all that was said is missed that
    is not written. The sum is the edit distance.
    """
    length = said.ids.shape[1]
    place = np.arange(length + 1, dtype=np.float32)
    beyond = place > said.counts[:, None]
    distance = np.where(beyond, _BEYOND, place)  # of what is written so far from each beginning of what was said
    least, added = np.zeros(len(distance), np.float32), np.zeros((len(distance), written.ids.shape[1] + 1), np.float32)
    for i in range(written.ids.shape[1]):
        longer = distance + 1
        longer[:, 1:] = np.minimum(longer[:, 1:], distance[:, :-1] + (said.ids != written.ids[:, i : i + 1]))
        longer = np.minimum.accumulate(longer - place, axis=1) + place  # symbols that were said and are not written
        longer[beyond] = _BEYOND
        distance = np.where((i < written.counts)[:, None], longer, distance)
        added[:, i] = distance.min(1) - least
        least = distance.min(1)
    rows = np.arange(len(distance))
    added[rows, written.counts] += distance[rows, said.counts] - least
    return added


def words(texts: Texts, space: int, numbers: dict[tuple[int, ...], int]) -> tuple[Texts, Ids]:
    """The words of `texts`, as numbers that `numbers` has or gets, and in which place each ends, [R, M].

    That is the place of the space behind it, or ``counts`` for a last word without one, and for all that is not a word.
    """
    found: list[list[tuple[int, int]]] = []
    for ids, count in zip(texts.ids.tolist(), texts.counts.tolist(), strict=True):
        row, begin = [], 0
        for end in [i for i, symbol in enumerate(ids[:count]) if symbol == space] + [count]:
            if begin < end:
                row.append((numbers.setdefault(tuple(ids[begin:end]), len(numbers)), end))
            begin = end + 1
        found.append(row)
    counts = np.array([len(row) for row in found])
    shape = (len(found), int(counts.max(initial=0)))
    each, ends = np.full(shape, -1), np.repeat(texts.counts[:, None], shape[1], axis=1)
    for of_row, numbered, at in zip(found, each, ends, strict=True):
        if of_row:
            numbered[: len(of_row)], at[: len(of_row)] = zip(*of_row, strict=True)
    return Texts(each, counts), ends


def costs(written: Texts, frames: Ids, num_frames: Ids, length: int, said: Texts, space: int) -> tuple[Costs, float]:
    """What is wrong with `written`, where it was written.

    Args:
        written: symbols of R texts.
        frames: [R, N] int64, the frame at which each was written.
        num_frames: [R] int64, of each row; what only the end shows is put to its last one.
        length: T, of the longest.
        said: symbols of what should have been written.
        space: the symbol between words.

    Returns:
        Costs [R, T] float32: 1 for each wrong word, where it ends, and `CHARACTER_COST` for each wrong character; and
        the word error rate of all rows together, a ratio.

    """
    last = np.maximum(num_frames - 1, 0)[:, None]
    at = np.concatenate([frames, last], axis=1)  # place `counts` and what is behind it are the end's
    at = np.where(np.arange(at.shape[1]) < written.counts[:, None], at, last)
    numbers: dict[tuple[int, ...], int] = {}
    (read, ends), (meant, _) = words(written, space, numbers), words(said, space, numbers)
    wrong = increases(read, meant)
    ends = np.concatenate([ends, written.counts[:, None]], axis=1)
    total = np.zeros((len(at), length), np.float32)
    row = np.arange(len(at))[:, None]
    np.add.at(total, (row, at), CHARACTER_COST * increases(written, said))
    np.add.at(total, (row, np.take_along_axis(at, ends, 1)), wrong)
    return total, float(wrong.sum() / max(1, meant.counts.sum()))
