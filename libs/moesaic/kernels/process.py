"""How a process that computes on the CPU is set up."""

import ctypes

import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_KEPT_BYTES = 1 << 30


def prepare_process(threads: int) -> None:
    """Compute on ``threads`` threads, 0 leaving it to torch, and keep freed memory for the next
    step.

    A step's larger tensors would otherwise go back to the system at its end, and each page of
    theirs be mapped and cleared again in the next one.
    """
    if threads:
        torch.set_num_threads(threads)
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc's own; another C library does as it likes
        libc.mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
