"""Leaving: other agents get this one's experts before it stops, if they have room."""

import asyncio
from collections.abc import Collection
from contextlib import suppress

import structlog

from moesaic.cluster.placement_view import watch_placement
from moesaic.cluster.redis.bus import Bus
from moesaic.cluster.registry import watch_fleet
from moesaic.messages.placement import Placement
from moesaic.messages.registry import WorkerRecord
from moesaic.placement.decide.proposal import propose

log = structlog.get_logger()

LOOK_S = 0.5  # for others that leave as well


async def hand_over(bus: Bus, worker_id: str, grace_s: float) -> bool:
    """Wait for a placement without this agent, for as long as one may come but at most ``grace_s``.

    Returns:
        True if others have its experts now.
    """
    async with watch_fleet(bus) as fleet, watch_placement(bus) as view:
        begun = False
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while not fleet.stale and may_follow(
                    worker_id, view.current, fleet.workers.values()
                ):
                    if not begun:
                        log.info("agent.handing_over", epoch=view.epoch)
                    begun, seen = True, view.version
                    with suppress(TimeoutError):
                        async with asyncio.timeout(LOOK_S):
                            await view.changed(seen)
        return begun and not _names(worker_id, view.current)


def may_follow(
    worker_id: str, current: Placement | None, records: Collection[WorkerRecord]
) -> bool:
    """Return true if a placement without an agent that leaves may follow the one in force.

    None may if no other agent stays, or if those that stay have no room for every expert.
    """
    stay = any(r.holds_experts and r.state == "ready" for r in records if r.worker_id != worker_id)
    if not stay or not _names(worker_id, current):
        return False
    wanted = propose(current, records).placement
    return wanted is not None and not _names(worker_id, wanted)


def _names(worker_id: str, placement: Placement | None) -> bool:
    return placement is not None and worker_id in {w.worker_id for w in placement.workers}
