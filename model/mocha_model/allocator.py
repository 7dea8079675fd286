"""How a process asks for memory. Knows nothing of tensors."""

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # of glibc's mallopt


def keep_memory() -> None:
    """Tell glibc to keep what is freed: giving it back and asking again costs a fifth of each model step.

    All threads share one heap, since only the first heap of a process is kept: others lose what is free at their ends.
    """
    try:
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(M_TRIM_THRESHOLD, -1)
        libc.mallopt(M_ARENA_MAX, 1)
    except (OSError, AttributeError):  # another C library
        return
