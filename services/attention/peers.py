"""The attention workers that have the other shares of the experts."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack

from moesaic.cluster.bus import Bus
from moesaic.cluster.registry import Fleet, watch_fleet
from moesaic.dispatch.gathered.peers import Peer
from moesaic.dispatch.gathered.plan import Share
from moesaic.engine.thread import EngineThread
from services.attention.settings import AttentionSettings


async def follow_peers(
    bus: Bus,
    settings: AttentionSettings,
    model_digest: str,
    parts: AsyncExitStack,
    thread: EngineThread,
    tell: Callable[[list[Peer]], None],
) -> None:
    """Call ``tell`` on ``thread`` with everyone who serves this model in the same way, now and after
    every change, until ``parts`` end."""
    fleet = await parts.enter_async_context(watch_fleet(bus))

    async def follow() -> None:
        while True:
            thread.call(tell, _peers(fleet, settings, model_digest))
            await fleet.changed()

    parts.callback(asyncio.create_task(follow()).cancel)


def _peers(fleet: Fleet, settings: AttentionSettings, model_digest: str) -> list[Peer]:
    return [
        Peer(record.worker_id, record.generation, record.data_address, Share.parse(record.share))
        for record in fleet.workers.values()
        if record.share
        and record.dispatch == settings.dispatch
        and record.model_digest == model_digest
        and record.worker_id != settings.worker_id
    ]
