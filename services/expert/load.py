"""Reports of an expert worker's load and costs, for whoever scales and predicts."""

import asyncio
import time
from contextlib import suppress

from moesaic.cluster.load_view import KEPT, REPORT_EVERY_S, STREAM
from moesaic.cluster.redis.bus import Bus
from moesaic.cluster.service import Identity
from moesaic.errors import PeerLost
from moesaic.experts.host import ExpertHost
from moesaic.messages.performance import LoadReport


async def report_load(bus: Bus, host: ExpertHost, identity: Identity, generation: int) -> None:
    """Report every ``REPORT_EVERY_S``, for ever."""
    since_s = time.monotonic()
    while True:
        await asyncio.sleep(REPORT_EVERY_S)
        costs = await asyncio.to_thread(host.take_costs)
        now_s = time.monotonic()
        report = LoadReport(
            worker_id=identity.worker_id,
            generation=generation,
            role=identity.role,
            at=time.time(),
            window_s=now_s - since_s,
            costs=costs,
        )
        since_s = now_s
        with suppress(PeerLost):
            await bus.append(STREAM, report, max_entries=KEPT)
