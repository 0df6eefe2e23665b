"""Links to the expert workers that the placement names."""

from moesaic.cluster.placement_view import watch_placement
from moesaic.dispatch.routed.dispatcher import RoutedDispatcher
from moesaic.experts.brownout.logical import LogicalExperts
from moesaic.native.own_thread import on_own_thread
from moesaic.services.attention.modes.contract import WorkerParts
from moesaic.services.attention.modes.peers import follow_placement
from moesaic.transport.frame import FrameLimits
from moesaic.transport.ucx.opening import OpenNetwork

PLACING = "a placement from the scheduler: KV gets the memory that experts leave"


async def experts_placed(worker: WorkerParts) -> None:
    """Wait until expert workers hold the experts, if the KV of a GPU gets what is left.

    One of these workers may be on the same GPU. Experts need a fixed number of bytes, and KV takes what
    there is, so KV must come second, in whatever order the processes start.
    """
    settings, process = worker.settings, worker.process
    if settings.device == "cpu" or settings.kv_blocks:
        return
    with process.status.waiting(PLACING):
        async with watch_placement(process.bus) as view:
            while view.current is None or view.current.model_digest != worker.config.digest:
                await view.changed()


async def link_expert_workers(worker: WorkerParts) -> tuple[OpenNetwork, RoutedDispatcher]:
    """Open a network on the engine's thread, and follow placements until the worker ends."""
    settings, config, thread = worker.settings, worker.config, worker.thread
    gates = await on_own_thread(worker.load_gates)
    limits = FrameLimits.of_hidden_size(config.hidden_size)
    network = await worker.open_network(limits, thread, worker.device)
    dispatcher = await thread.build(
        RoutedDispatcher,
        network.network,
        gates,
        settings.expert_timeout_s,
        settings.expert_scheduling,
        deterministic=settings.deterministic,
        wire=settings.wire_dtype,
        substitution_of=LogicalExperts(worker.checkpoint, config).layer_substitution,
        node=settings.node_name,
    )
    worker.process.parts.push_async_callback(lambda: thread.run(dispatcher.close()))
    await follow_placement(worker, thread, dispatcher)
    return network, dispatcher
