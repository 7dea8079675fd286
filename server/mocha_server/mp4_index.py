"""What the index of an MP4 file says there is to come, before FFmpeg believes it.

FFmpeg makes an entry in memory of each sample that the index names, and a few bytes can name a hundred million of one
size. Knows the boxes of ISO/IEC 14496-12 that count samples, and nothing of the samples.
"""

import struct
from collections.abc import Iterator
from typing import IO

CONTAINERS = (b"moov", b"trak", b"mdia", b"minf", b"stbl", b"moof", b"traf")
DEEPEST = 10  # as deep as FFmpeg looks
MOST_BOXES = 1_000_000  # of fragments there are several
FEW = 4_000_000  # entries, of some 30 bytes each
LEAST_BYTES = 8  # of a file for each entry, where there are more
TOGETHER = 1024  # samples of sound that is not compressed are one entry
ROW, MOST_RUNS = struct.Struct(">III"), 1_000_000  # of chunks with as many samples each


def promises_too_much(file: IO[bytes]) -> bool:
    """Whether `file` is an MP4 file whose index would need far more memory than its size explains; rewinds it."""
    size = file.seek(0, 2)
    entries = _num_entries(file, size)
    file.seek(0)
    return entries > max(FEW, size // LEAST_BYTES)


def _num_entries(file: IO[bytes], size: int) -> int:
    """Entries that FFmpeg would make, or more than there may be."""
    entries, table = 0, dict[bytes, tuple[int, int]]()
    for number, (kind, first, last) in enumerate(_boxes(file, 0, size)):
        if number == MOST_BOXES:
            return size
        if kind == b"trun":  # of a fragment
            entries += _numbers(file, first + 4, 1)[0]
        elif kind == b"stbl":
            entries, table = entries + _entries_of(file, table), {}
        table[kind] = first, last
    return entries + _entries_of(file, table)


def _entries_of(file: IO[bytes], table: dict[bytes, tuple[int, int]]) -> int:
    """Of one track, whose boxes begin and end where `table` says."""
    if b"stsz" not in table:
        return 0
    count = _numbers(file, table[b"stsz"][0] + 8, 1)[0]
    if b"stts" not in table or _numbers(file, table[b"stts"][0] + 4, 3)[::2] != (1, 1):
        return count
    chunks = sum(_numbers(file, table[kind][0] + 4, 1)[0] for kind in (b"stco", b"co64") if kind in table)
    return chunks * (1 + _most_in_a_chunk(file, *table[b"stsc"]) // TOGETHER) if b"stsc" in table else 0


def _most_in_a_chunk(file: IO[bytes], first: int, last: int) -> int:
    """Samples; a box of `stsc` has three numbers for each run of chunks, the second of which says it."""
    count = (last - first - 8) // ROW.size
    if count > MOST_RUNS:
        return 1 << 32
    file.seek(first + 8)
    numbers = file.read(count * ROW.size)
    return max((row[1] for row in ROW.iter_unpack(numbers[: len(numbers) // ROW.size * ROW.size])), default=0)


def _boxes(file: IO[bytes], start: int, end: int, depth: int = 0) -> Iterator[tuple[bytes, int, int]]:
    """All boxes between two places of `file`: what each is, and where its content begins and ends."""
    while start + 8 <= end:
        file.seek(start)
        size, kind = struct.unpack(">I4s", file.read(8))
        first = start + 8
        if size == 1:
            size, first = _numbers(file, first, 1, "Q")[0], first + 8
        start, last = start + size, min(start + size, end) if size else end
        if last < first:
            return
        yield kind, first, last
        if kind in CONTAINERS and depth < DEEPEST:
            yield from _boxes(file, first, last, depth + 1)
        if not size:
            return


def _numbers(file: IO[bytes], at: int, count: int, code: str = "I") -> tuple[int, ...]:
    """Big-endian integers; zeros beyond the end."""
    file.seek(at)
    layout = struct.Struct(f">{count}{code}")
    found: tuple[int, ...] = layout.unpack(file.read(layout.size).ljust(layout.size, b"\0"))
    return found
