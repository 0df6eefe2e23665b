"""Reports of an engine's load and costs, for whoever scales and predicts."""

import asyncio
import time
from contextlib import suppress

from moesaic.cluster.load_view import KEPT, REPORT_EVERY_S, STREAM
from moesaic.cluster.redis.bus import Bus
from moesaic.cluster.service import Identity
from moesaic.engine.engine import EngineLoad
from moesaic.engine.ledger import LedgerPage
from moesaic.errors import PeerLost
from moesaic.messages.performance import LoadReport
from moesaic.services.attention.engine import RunningEngine


async def report_load(
    bus: Bus, running: RunningEngine, identity: Identity, generation: int
) -> None:
    """Report every ``REPORT_EVERY_S``, for ever; while Redis is gone, what happens meanwhile is reported later."""

    async def look() -> tuple[LedgerPage, EngineLoad]:
        return running.engine.take_page(), running.engine.load()

    unsent: LedgerPage | None = None
    while True:
        await asyncio.sleep(REPORT_EVERY_S)
        page, load = await running.thread.run(look())
        page = unsent = page if unsent is None else unsent.and_then(page)
        report = LoadReport(
            worker_id=identity.worker_id,
            generation=generation,
            role=identity.role,
            at=time.time(),
            window_s=page.window_s,
            waiting=load.num_waiting,
            latencies=page.latencies,
            ended=page.ended,
            arrivals=page.arrivals,
            arrived=page.arrived,
            costs=page.costs,
        )
        with suppress(PeerLost):
            await bus.append(STREAM, report, max_entries=KEPT)
            unsent = None
