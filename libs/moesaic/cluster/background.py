"""A task that runs beside a block of code."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any


@asynccontextmanager
async def background(work: Coroutine[Any, Any, None], name: str) -> AsyncIterator[None]:
    """Run ``work`` for the length of the block; if it fails, the block is cancelled.

    Raises:
        ExceptionGroup: with the errors of ``work`` and of the block.
    """
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(work, name=name)
        try:
            yield
        finally:
            task.cancel()
