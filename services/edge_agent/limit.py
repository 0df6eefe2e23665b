"""Enforcement of an agent's memory limit: free memory is given back, and the plan learns from excess."""

import asyncio
import time
from dataclasses import replace

import structlog

from moesaic.cluster.registry import Lease
from moesaic.errors import InvalidInput
from moesaic.native.heap import trim_heap
from moesaic.native.memory import huge_pages
from moesaic.services.edge_agent.profile import Profiler

log = structlog.get_logger()

LOOK_EVERY_S = 0.05
TRIM_SHARE = 0.9  # of the limit, from which on the heap gives back what it can
GROWN_SHARE = 1 / 128  # of the limit, since memory was last given back
BEYOND_EVERY_S = 1.0  # memory beyond the limit is given back so often even if it has not grown
LEARN_SHARE = 1 / 64  # of the limit, beyond what was measured


class MemoryLimit:
    """Keeps one agent within its limit.

    Depending on the requests, steps, messages and the heap sometimes take more than planned. If they exceed
    the limit, the excess is kept free from then on, and the scheduler moves experts away.
    """

    def __init__(self, profiler: Profiler, lease: Lease) -> None:
        self._profiler, self._site, self._lease = profiler, profiler.site, lease
        self._left_bytes = 0  # after memory was last given back
        self._trimmed_s = 0.0

    async def set(self, limit_bytes: int) -> int:
        """Change the limit; experts beyond it leave with the next placement.

        Returns:
            The experts that a placement may put here.

        Raises:
            InvalidInput: it leaves no room for experts.
        """
        self._site.change_limit(limit_bytes)
        await self._tell()
        return self._site.plan.num_slots

    async def keep(self) -> None:
        """Watch the memory, for ever."""
        while True:
            used_bytes = self._profiler.used_bytes
            if self._is_short(used_bytes):
                was_settled = (
                    self._site.is_settled
                )  # what leaves during the pass is not given back by it
                await asyncio.to_thread(_trim)
                used_bytes = self._left_bytes = self._profiler.used_bytes
                self._trimmed_s = time.monotonic()
                if was_settled and self._site.is_settled:
                    await self._learn(used_bytes)
            self._left_bytes = min(self._left_bytes, used_bytes)
            await asyncio.sleep(LOOK_EVERY_S)

    def _is_short(self, used_bytes: int) -> bool:
        """True if there may be memory to give back, and little is left of the limit."""
        limit_bytes = self._site.plan.limit_bytes
        if not 0 < TRIM_SHARE * limit_bytes < used_bytes:
            return False
        if used_bytes > self._left_bytes + GROWN_SHARE * limit_bytes:
            return True
        return used_bytes > limit_bytes and time.monotonic() > self._trimmed_s + BEYOND_EVERY_S

    async def _learn(self, used_bytes: int) -> None:
        """Plan with less from now on, if more than the present limit was taken."""
        site, limit_bytes = self._site, self._site.plan.limit_bytes
        if not 0 < limit_bytes < used_bytes:
            return
        more_bytes = used_bytes - limit_bytes + int(LEARN_SHARE * limit_bytes)
        log.warning("memory.exceeded", limit_bytes=limit_bytes, used_bytes=used_bytes)
        before = site.needs
        site.needs = replace(before, held=before.held + more_bytes)
        try:
            site.change_limit(limit_bytes)
        except InvalidInput:  # not even one expert would have a slot
            site.needs = before
            return
        await self._tell()

    async def _tell(self) -> None:
        plan = self._site.plan
        await self._lease.update(
            num_slots=plan.num_slots, max_expert_bytes=self._site.allowed_bytes
        )


def _trim() -> None:
    trim_heap()
    huge_pages.trim()
