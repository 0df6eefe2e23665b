"""Who gives experts: attention workers that have the other shares, or expert workers, as placed."""

from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Protocol

import structlog

from moesaic.cluster.background import background
from moesaic.cluster.bus import Bus
from moesaic.cluster.placement_view import PlacementView
from moesaic.cluster.registry import Fleet, watch_fleet
from moesaic.dispatch.gathered.peers import Peer
from moesaic.dispatch.gathered.plan import Share
from moesaic.engine.thread import EngineThread
from moesaic.messages.placement import Placement
from services.attention.settings import AttentionSettings

Find = Callable[[Fleet], list[Peer]]
log = structlog.get_logger()


class TakesPlacements(Protocol):
    """What expert workers hold matters to it."""

    def set_placement(self, placement: Placement) -> None:
        """Learn a committed placement."""
        ...


async def follow_peers(
    bus: Bus,
    find: Find,
    parts: AsyncExitStack,
    thread: EngineThread,
    tell: Callable[[list[Peer]], None],
) -> None:
    """Call ``tell`` on ``thread`` with everyone whom ``find`` finds, now and after every change,
    until ``parts`` end."""
    fleet = await parts.enter_async_context(watch_fleet(bus))

    async def follow() -> None:
        while True:
            thread.call(tell, find(fleet))
            await fleet.changed()

    await parts.enter_async_context(background(follow(), "peers"))


async def follow_placement(
    view: PlacementView, thread: EngineThread, taker: TakesPlacements, model_digest: str
) -> None:
    """Tell ``taker``, on ``thread``, of every placement that is for this checkpoint; for ever."""
    while True:
        placement = view.current
        if placement is not None:
            if placement.model_digest == model_digest:
                thread.call(taker.set_placement, placement)
            else:
                log.error(
                    "placement.foreign", epoch=placement.epoch, model_digest=placement.model_digest
                )
        await view.changed()


def sharing_peers(settings: AttentionSettings, model_digest: str) -> Find:
    """Finds everyone who serves this model in the same way."""

    def find(fleet: Fleet) -> list[Peer]:
        return [
            Peer(
                record.worker_id, record.generation, record.data_address, Share.parse(record.share)
            )
            for record in fleet.workers.values()
            if record.share
            and record.dispatch == settings.dispatch
            and record.model_digest == model_digest
            and record.worker_id != settings.worker_id
        ]

    return find
