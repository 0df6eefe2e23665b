"""Requests begin one at a time, tenants in turn, and the event loop gets to its other work in between.

To read a request and ask for its work takes milliseconds. Where one tenant sends hundreds at once, another's next
request would begin behind all of them, and answers that go on would stop meanwhile.
"""

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from moesaic.errors import Overloaded

T = TypeVar("T")


class TurnQueue:
    """Requests that wait for a turn."""

    def __init__(self) -> None:
        # By tenant; the tenant whose turn is next comes first.
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    def wait(self, tenant: str) -> asyncio.Future[None]:
        """Let a request of ``tenant`` wait; the result is there when its turn comes."""
        mine = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(mine)
        return mine

    def displace(self, tenant: str, error: Exception) -> bool:
        """Have the last request of the tenant with the most leave, if that leaves it as many as ``tenant`` has then.

        Returns:
            False: nobody has to leave for a request of ``tenant``.
        """
        heaviest = max(self._waiting, key=lambda other: len(self._waiting[other]), default=None)
        if heaviest is None:
            return False
        its, mine = self._waiting[heaviest], self._waiting.get(tenant, ())
        if heaviest == tenant or len(its) < len(mine) + 2:
            return False
        last = its.pop()
        # Else its client has left, and so it leaves by itself.
        if not last.done():
            last.set_exception(error)
        return True

    def next(self) -> bool:
        """Give the next one its turn; those whose clients have left are passed over.

        Returns:
            False if nobody waits.
        """
        while self._waiting:
            tenant, its = next(iter(self._waiting.items()))
            mine = its.popleft()
            del self._waiting[tenant]
            if its:
                # Behind the others
                self._waiting[tenant] = its
            if not mine.done():
                mine.set_result(None)
                return True
        return False


class Turnstile:
    """Lets one request through in each round of the loop."""

    def __init__(self) -> None:
        self._turns = TurnQueue()
        self._was_passed = False  # in this round

    async def turn(self, tenant: str) -> None:
        """Wait for the turn of one request of ``tenant``; if none waits, that is now."""
        if not self._was_passed:
            self._was_passed = True
            asyncio.get_running_loop().call_soon(self._next_round)
            return
        await self._turns.wait(tenant)

    def give_way(self, tenant: str) -> bool:
        """Send the last one away of those that wait, if it has to give way to a request of ``tenant``."""
        return self._turns.displace(tenant, Overloaded("others that had less went before"))

    def _next_round(self) -> None:
        self._was_passed = self._turns.next()
        if self._was_passed:
            asyncio.get_running_loop().call_soon(self._next_round)


class Lane:
    """One thread for what takes long, so that the event loop shares the interpreter with one other at most."""

    def __init__(self) -> None:
        self._turns = TurnQueue()
        self._is_busy = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="bodies")

    async def work(self, tenant: str, call: Callable[..., T], *args: object) -> T:
        """Do some work for a request of ``tenant`` when its turn comes."""
        if self._is_busy:
            mine = self._turns.wait(tenant)
            try:
                await mine
            except asyncio.CancelledError:
                # Its turn came when it had gone.
                if mine.done() and not mine.cancelled():
                    self._is_busy = self._turns.next()
                raise
        self._is_busy = True
        try:
            run = contextvars.copy_context().run
            return await asyncio.get_running_loop().run_in_executor(self._thread, run, call, *args)
        finally:
            self._is_busy = self._turns.next()
