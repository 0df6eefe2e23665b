"""The C library's heap, which keeps what was freed: a pool for each thread, and much of each."""

import ctypes
from contextlib import suppress

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # of malloc.h


def trim_heap() -> None:
    """Give back what was freed, also between what is in use; takes milliseconds."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def keep_heap_small() -> None:
    """Have all threads share one pool, which gives back what it does not need; call it before there are others.

    That costs threads some waiting for each other, and saves megabytes for each of them.
    """
    # Another C library
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_TRIM_THRESHOLD, 256 << 10)
        mallopt(_M_MMAP_THRESHOLD, 128 << 10)
