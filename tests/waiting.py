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
# The same after a look that took long, as one that starts a command: the cores are for those that are waited for.
MOST_POLL_S = 0.5

T = TypeVar("T")


def eventually(condition: Callable[[], T]) -> T:
    """Wait until a condition holds, and return what it gave."""
    began_s = looked_s = time.monotonic()
    while not (found := condition()):
        time.sleep(_pause_s(began_s, looked_s, condition, found))
        looked_s = time.monotonic()
    return found


async def until(condition: Callable[[], T | Awaitable[T]]) -> T:
    """Wait in a task until a condition holds, which may be a coroutine, and return what it gave."""
    began_s = time.monotonic()
    while True:
        looked_s = time.monotonic()
        given = condition()
        found = await given if inspect.isawaitable(given) else given
        if found:
            return found
        await asyncio.sleep(_pause_s(began_s, looked_s, condition, found))


def _pause_s(
    began_s: float, looked_s: float, condition: Callable[[], object], found: object
) -> float:
    """Time until the next look, after one in vain; fails if the wait has taken too long."""
    now_s = time.monotonic()
    assert now_s < began_s + HANG_S, _unmet(condition, found)
    return min(max(POLL_S, 2 * (now_s - looked_s)), MOST_POLL_S)


def _unmet(condition: Callable[[], object], found: object) -> str:
    try:
        wanted = inspect.getsource(condition).strip()
    except (OSError, TypeError):
        wanted = repr(condition)
    return f"after {HANG_S:.0f} s this still gives {found!r}: {wanted}"
