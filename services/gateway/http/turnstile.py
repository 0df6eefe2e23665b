"""Requests begin one at a time, tenants in turn, and the event loop gets to its other work in between.

To read a request and ask for its work takes milliseconds. Where one tenant sends hundreds at once, another's next
request would begin behind all of them, and answers that go on would stop meanwhile.
"""

import asyncio
from collections import deque


class Turnstile:
    """Lets one request through in each round of the loop."""

    def __init__(self) -> None:
        # By tenant; the tenant whose turn is next comes first.
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._was_passed = False  # in this round

    async def turn(self, tenant: str) -> None:
        """Wait for the turn of one request of ``tenant``; if none waits, that is now."""
        loop = asyncio.get_running_loop()
        if not self._was_passed:
            self._was_passed = True
            loop.call_soon(self._next_round)
            return
        mine = loop.create_future()
        self._waiting.setdefault(tenant, deque()).append(mine)
        await mine

    def _next_round(self) -> None:
        while self._waiting:
            tenant, its = next(iter(self._waiting.items()))
            mine = its.popleft()
            del self._waiting[tenant]
            if its:
                self._waiting[tenant] = its  # behind the others
            if not mine.done():  # its client has not left
                mine.set_result(None)
                asyncio.get_running_loop().call_soon(self._next_round)
                return
        self._was_passed = False
