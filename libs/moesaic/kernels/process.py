"""How a process that computes on the CPU is set up."""

import asyncio
import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")

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


async def on_own_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Compute something beside the engine, such as the packed form of weights, on a thread that ends
    with it.

    OpenMP keeps threads ready for every thread that has ever computed. Once all these are more than
    the cores, none of them waits awake, and the engine's products take twice as long.
    """
    executor = ThreadPoolExecutor(1, thread_name_prefix="own")
    try:
        return await asyncio.get_running_loop().run_in_executor(
            executor, lambda: work(*args, **kwargs)
        )
    finally:
        executor.shutdown(wait=False)
