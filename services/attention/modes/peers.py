"""The other workers, told to a dispatcher as they come and go."""

from collections.abc import Callable
from typing import Protocol, TypeVar

import structlog

from moesaic.cluster.background import tended
from moesaic.cluster.placement_view import watch_placement
from moesaic.cluster.registry import Fleet, watch_fleet
from moesaic.dispatch.gathered.peers import Peer
from moesaic.engine.thread import EngineThread
from moesaic.experts.pull.ranges import Share
from moesaic.messages.placement import Placement
from moesaic.services.attention.modes.contract import WorkerParts

T = TypeVar("T")
log = structlog.get_logger()


class TakesPlacements(Protocol):
    """A dispatcher, or a part of one, that depends on what expert workers hold."""

    def set_placement(self, placement: Placement) -> None:
        """Learn a committed placement."""
        ...


async def follow_fleet(
    worker: WorkerParts,
    thread: EngineThread,
    find: Callable[[WorkerParts, Fleet], T],
    tell: Callable[[T], None],
    name: str = "peers",
) -> None:
    """Call ``tell`` on ``thread`` with what ``find`` finds, now and after every change, until the
    worker ends.

    Args:
        worker: that follows.
        thread: to call ``tell`` on.
        find: picks those of the fleet that matter.
        tell: takes all of them.
        name: of the task, for people.
    """
    fleet = await worker.process.enter(watch_fleet(worker.process.bus))

    async def follow() -> None:
        while True:
            thread.call(tell, find(worker, fleet))
            await fleet.changed()

    await worker.process.enter(tended(follow, name))


async def follow_placement(
    worker: WorkerParts, thread: EngineThread, taker: TakesPlacements
) -> None:
    """Tell ``taker``, on ``thread``, of every placement of this checkpoint, until the worker ends."""
    view = await worker.process.enter(watch_placement(worker.process.bus))

    async def follow() -> None:
        while True:
            placement = view.current
            if placement is not None:
                if placement.model_digest == worker.config.digest:
                    thread.call(taker.set_placement, placement)
                else:
                    digest = placement.model_digest
                    log.error("placement.foreign", epoch=placement.epoch, model_digest=digest)
            await view.changed()

    await worker.process.enter(tended(follow, "placements"))


def share_peers(worker: WorkerParts, fleet: Fleet) -> list[Peer]:
    """Find the attention workers that serve this model in the same mode, a share each."""
    settings = worker.settings
    return [
        Peer(record.worker_id, record.generation, record.data_address, Share.parse(record.share))
        for record in fleet.workers.values()
        if record.share
        and record.dispatch == settings.dispatch
        and record.model_digest == worker.config.digest
        and record.worker_id != settings.worker_id
    ]
