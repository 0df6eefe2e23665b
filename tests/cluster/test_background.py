"""Tasks beside a block: those that need the block, and those that no input may end."""

import asyncio

import pytest
from structlog.testing import capture_logs

from moesaic.cluster.background import background, tended
from moesaic.errors import InvalidInput


async def test_a_tended_task_begins_again_after_each_error() -> None:
    begun: list[int] = []
    done = asyncio.Event()
    errors = [
        InvalidInput("a", "b"),
        RecursionError(),
        MemoryError(),
        ExceptionGroup("", [OSError()]),
    ]

    async def work() -> None:
        begun.append(len(begun))
        if len(begun) <= len(errors):
            raise errors[len(begun) - 1]
        done.set()
        await asyncio.Event().wait()

    with capture_logs() as logs:
        async with tended(work, "test"):
            await done.wait()

    assert len(begun) == len(errors) + 1
    assert [entry["event"] for entry in logs] == ["task.failed"] * len(errors)


async def test_a_tended_task_ends_with_its_block() -> None:
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with tended(work, "test"):
        await asyncio.sleep(0)

    assert ended.is_set()


async def test_an_error_in_the_background_ends_the_block() -> None:
    async def work() -> None:
        raise InvalidInput("a", "b")

    with pytest.raises(ExceptionGroup):
        async with background(work(), "test"):
            await asyncio.Event().wait()
