"""Rest of an expert worker on standby: no placement names it, and no attention worker asks it.

The experts of its last placement stay in memory: with the same ones it works again at once, and of others it loads only
those that it lacks.
"""

from collections.abc import Awaitable, Callable

from moesaic.cluster.placement_view import PlacementView
from moesaic.engine.thread import EngineThread
from moesaic.experts.host import ExpertHost
from moesaic.messages.placement import Placement
from moesaic.transport.ucx.network import UcxNetwork


def resting(
    worker_id: str,
    view: PlacementView,
    host: ExpertHost,
    network: UcxNetwork,
    thread: EngineThread,
) -> Callable[[], Awaitable[bool]]:
    """Make the test whether this worker has nothing to do.

    Args:
        worker_id: of this worker.
        view: of the committed placement.
        host: of its experts.
        network: at which it is asked; lives on ``thread``.
        thread: of the engine.
    """

    async def served_peers() -> list[str]:
        return network.served_peers

    async def rests() -> bool:
        placed = _workers(view.current)
        if worker_id in placed:
            return False
        # Colleagues come only for attention workers: they are not waited for.
        colleagues = placed | _workers(host.epochs.placement(host.epochs.in_force))
        return not set(await thread.run(served_peers())) - colleagues

    return rests


def _workers(placement: Placement | None) -> set[str]:
    return {worker.worker_id for worker in placement.workers} if placement else set()
