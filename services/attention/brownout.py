"""Brownout between the cluster and the engine: its policy comes in, its decisions go out."""

import asyncio
from collections import deque
from contextlib import suppress

import structlog
from msgspec.structs import replace

from moesaic.cluster.brownout_view import DECISIONS, watch_brownout
from moesaic.cluster.redis.bus import Bus
from moesaic.errors import PeerLost
from moesaic.messages.brownout import BrownoutDecision
from moesaic.services.attention.engine import RunningEngine
from moesaic.services.attention.substitution import SubstitutionFollower

log = structlog.get_logger()

TELL_EVERY_S = 0.5
MOST_UNTOLD = 200  # while Redis is gone


async def follow_policy(
    bus: Bus, running: RunningEngine, substitutions: SubstitutionFollower
) -> None:
    """Have the engine and its experts follow the policy of brownout, for ever."""
    async for policy in watch_brownout(bus):
        log.info("brownout.policy", mode=policy.mode, way=policy.way, rule=policy.rule)
        await substitutions.follow(policy)
        running.set_brownout(policy)


async def tell_decisions(bus: Bus, running: RunningEngine, worker_id: str, generation: int) -> None:
    """Tell the scheduler the engine's decisions, for ever; while Redis is gone, the last ones wait."""
    untold: deque[BrownoutDecision] = deque(maxlen=MOST_UNTOLD)
    while True:
        for decision in await running.thread.build(running.engine.brownout.take_decisions):
            untold.append(replace(decision, worker_id=worker_id, generation=generation))
        with suppress(PeerLost):
            while untold:
                await bus.append(DECISIONS, untold[0])
                untold.popleft()
        await asyncio.sleep(TELL_EVERY_S)
