"""Reports of workers about their load and their costs; messages are in ``moesaic.messages.performance``."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from msgspec.structs import replace

from moesaic.cluster.redis.bus import Bus
from moesaic.cluster.service import Identity
from moesaic.errors import PeerLost
from moesaic.messages.performance import LoadReport

STREAM = "ctl:load"
KEPT = 4096  # reports in Redis, of all workers
REPORT_EVERY_S = 2.0


async def report_load(
    bus: Bus, identity: Identity, generation: int, take: Callable[[], Awaitable[LoadReport]]
) -> None:
    """Report the result of ``take`` every ``REPORT_EVERY_S``, for ever, with the worker's names.

    While Redis is gone, reports are delayed.
    """
    worker_id, role = identity.worker_id, identity.role
    unsent: LoadReport | None = None
    while True:
        await asyncio.sleep(REPORT_EVERY_S)
        taken = await take()
        unsent = taken if unsent is None else unsent.and_then(taken)
        report = replace(
            unsent, worker_id=worker_id, generation=generation, role=role, at=time.time()
        )
        with suppress(PeerLost):
            await bus.append(STREAM, report, max_entries=KEPT)
            unsent = None
