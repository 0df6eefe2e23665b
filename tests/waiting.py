"""Waits for what other tasks, threads and processes do, which end when it is done and not after some seconds.

Also where the project is not installed: tests of other people's clients have an environment of their own.
"""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

# Names a hang and nothing else: no machine may be so slow that a wait in a test takes as long.
HANG_S = 300.0
# Between two looks.
POLL_S = 0.01

T = TypeVar("T")


def eventually(condition: Callable[[], T]) -> T:
    """Wait until a condition holds, and return what it gave."""
    end_s = time.monotonic() + HANG_S
    while not (found := condition()):
        assert time.monotonic() < end_s, _unmet(condition, found)
        time.sleep(POLL_S)
    return found


async def until(condition: Callable[[], T | Awaitable[T]]) -> T:
    """Wait in a task until a condition holds, which may be a coroutine, and return what it gave."""
    end_s = time.monotonic() + HANG_S
    while True:
        given = condition()
        found = await given if inspect.isawaitable(given) else given
        if found:
            return found
        assert time.monotonic() < end_s, _unmet(condition, found)
        await asyncio.sleep(POLL_S)


def _unmet(condition: Callable[[], object], found: object) -> str:
    try:
        wanted = inspect.getsource(condition).strip()
    except (OSError, TypeError):
        wanted = repr(condition)
    return f"after {HANG_S:.0f} s this still gives {found!r}: {wanted}"
