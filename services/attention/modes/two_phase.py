"""Rows for experts on other nodes that travel together with those of this node's other workers."""

from moesaic.addresses import is_everywhere
from moesaic.cluster.registry import Fleet
from moesaic.dispatch.links import Endpoint
from moesaic.dispatch.routed.dispatcher import RoutedDispatcher
from moesaic.dispatch.two_phase.dispatcher import TwoPhaseDispatcher
from moesaic.services.attention.modes.contract import WorkerParts
from moesaic.services.attention.modes.peers import follow_fleet
from moesaic.transport.ucx.opening import OpenNetwork


async def join_node(worker: WorkerParts, network: OpenNetwork, dispatcher: RoutedDispatcher) -> str:
    """Let ``dispatcher`` send rows as ``--exchange`` says, together with the node's other workers.

    Returns:
        The address at which this worker receives their rows; empty if it receives none.
    """
    settings, thread = worker.settings, worker.thread
    # What is not summed up does not travel together, and an address of everywhere nobody could dial.
    alone = settings.exchange == "direct" or settings.deterministic
    if alone or is_everywhere(settings.data.advertised_host):
        return ""
    two_phase = await thread.build(
        TwoPhaseDispatcher,
        network.network,
        settings.worker_id,
        settings.node_name,
        settings.exchange,
        settings.expert_timeout_s,
        dispatcher.route_of,
        settings.wire_dtype,
    )
    await thread.build(dispatcher.use, two_phase)
    address = await network.listen(settings.data_port, two_phase.answer)

    def tell(found: tuple[list[Endpoint], int]) -> None:
        two_phase.set_neighbours(*found)

    await follow_fleet(worker, thread, _neighbours, tell, "neighbours")
    return address


def _neighbours(worker: WorkerParts, fleet: Fleet) -> tuple[list[Endpoint], int]:
    """Find the attention workers that bring rows together for the same experts.

    Returns:
        Those of this node, and the number of nodes with any that take work.
    """
    settings = worker.settings
    records = [
        record
        for record in fleet.workers.values()
        if record.role == "attention"
        and record.dispatch == "routed"
        and record.data_address
        and not record.share
        and record.model_digest == worker.config.digest
        and record.state != "standby"  # it has no rows to bring
    ]
    near = [
        Endpoint(record.worker_id, record.generation, record.data_address)
        for record in records
        if record.node == settings.node_name and record.worker_id != settings.worker_id
    ]
    return near, len(
        {settings.node_name, *(record.node for record in records if record.state == "ready")}
    )
