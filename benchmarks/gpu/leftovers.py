"""Processes that a benchmark leaves behind, such as a suite that was starting when its time was up.

They would keep memory of the device from later benchmarks.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
WAIT_S = 10.0


@contextmanager
def ending_leftovers() -> Iterator[None]:
    """Kill all processes that were started within the block, even those whose parents have ended."""
    prctl, this = ctypes.CDLL(None).prctl, psutil.Process()
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    kept = set(this.children(recursive=True))
    try:
        yield
    finally:
        left = set(this.children(recursive=True)) - kept
        for each in left:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        psutil.wait_procs(left, WAIT_S)
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
