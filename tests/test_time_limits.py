"""Tests that wait are ended, except those without a limit."""

import asyncio

import pytest

from tests.conftest import _ended_in_time


@pytest.mark.timeout(0)
async def test_a_test_without_a_limit_may_wait() -> None:
    await asyncio.sleep(0.01)


async def test_a_test_that_waits_is_ended() -> None:
    async def waits() -> None:
        await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await _ended_in_time(waits, 0.01)()
