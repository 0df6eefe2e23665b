"""Computing beside the engine, on a thread of its own."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from moesaic.native.heap import trim_heap

P = ParamSpec("P")
T = TypeVar("T")


async def on_own_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Compute something beside the engine, such as the packed form of weights, on a thread that ends
    with it.

    torch keeps a team of OpenMP's threads for every thread that has ever computed, until that thread
    ends. With more of these than cores, torch's products on the engine take twice as long. Memory
    that the thread has freed goes back to the system: glibc would keep it for threads to come.
    """
    executor = ThreadPoolExecutor(1, thread_name_prefix="own")
    try:
        return await asyncio.get_running_loop().run_in_executor(
            executor, lambda: work(*args, **kwargs)
        )
    finally:
        executor.shutdown(wait=False)
        trim_heap()
