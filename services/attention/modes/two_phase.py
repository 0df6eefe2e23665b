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

    await follow_fleet(worker, thread, _neighbours, two_phase.set_neighbours, "neighbours")
    return address


def _neighbours(worker: WorkerParts, fleet: Fleet) -> list[Endpoint]:
    """Find the attention workers of this node that bring rows together for the same experts."""
    settings = worker.settings
    return [
        Endpoint(record.worker_id, record.generation, record.data_address)
        for record in fleet.workers.values()
        if record.role == "attention"
        and record.dispatch == "routed"
        and record.data_address
        and not record.share
        and record.model_digest == worker.config.digest
        and record.state != "standby"  # it has no rows to bring
        and record.node == settings.node_name
        and record.worker_id != settings.worker_id
    ]
