"""Loading on several threads, which end with it."""

from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TypeVar

import torch

K = TypeVar("K")
T = TypeVar("T")

MOST_THREADS = 16  # more are waiting for memory


def loading_threads() -> int:
    """Number of threads that load: as many as compute, which follows the cores or ``--threads``."""
    return min(torch.get_num_threads(), MOST_THREADS)


def on_threads(work: Callable[[K], T], of: Iterable[K], num_threads: int | None = None) -> list[T]:
    """Do ``work`` of each, in any order, on threads of their own; by default on ``loading_threads``.

    Once one fails no other begins.

    Returns:
        The results, in order.

    Raises:
        Exception: the first failure, when all have ended.
    """
    items, num_threads = list(of), num_threads or loading_threads()
    if min(num_threads, len(items)) <= 1:
        return [work(each) for each in items]
    with ThreadPoolExecutor(min(num_threads, len(items)), "load") as threads:
        begun = [threads.submit(work, each) for each in items]
        for future in wait(begun, return_when=FIRST_EXCEPTION).not_done:
            future.cancel()
    failures = (f.exception() for f in begun if not f.cancelled())
    if (failure := next(filter(None, failures), None)) is not None:
        raise failure
    return [future.result() for future in begun]
