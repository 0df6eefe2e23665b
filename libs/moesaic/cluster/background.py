"""Tasks that run beside a block of code."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import structlog
from prometheus_client import Counter

from moesaic.cluster.waiting import Backoff

log = structlog.get_logger()

_failures = Counter(
    "moesaic_task_failures", "Errors of background tasks, which were restarted", ["task"]
)


@asynccontextmanager
async def background(work: Coroutine[Any, Any, None], name: str) -> AsyncIterator[None]:
    """Run ``work`` for the length of the block; if it fails, the block is cancelled.

    Use it for work that the process cannot do without and that depends on nothing that others wrote.
    Other work is for ``tended``.

    Raises:
        ExceptionGroup: with the errors of ``work`` and of the block.
    """
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(work, name=name)
        try:
            yield
        finally:
            task.cancel()


def tended(
    work: Callable[[], Coroutine[Any, Any, None]], name: str
) -> AbstractAsyncContextManager[None]:
    """Run ``work`` for the length of the block, and restart it whenever it fails."""
    return background(again_and_again(work, name), name)


async def again_and_again(work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
    """Run ``work``, and restart it after a pause whenever it fails; no input ends a process."""
    backoff = Backoff(0.1, 10.0)
    # From the start, so that a first failure shows as an increase.
    failures = _failures.labels(name)
    while True:
        try:
            await work()
        except Exception:
            failures.inc()
            log.exception("task.failed", task=name)
            await backoff.pause()
        else:
            return
