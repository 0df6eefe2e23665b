"""Links to the expert workers that the placement names."""

import asyncio
import time

import structlog

from moesaic.cluster.placement_view import PlacementView, watch_placement
from moesaic.cluster.registry import Fleet, watch_fleet
from moesaic.dispatch.routed.dispatcher import RoutedDispatcher
from moesaic.experts.brownout.logical import LogicalExperts
from moesaic.messages.placement import Incarnation, Placement
from moesaic.native.own_thread import on_own_thread
from moesaic.services.attention.modes.contract import WorkerParts
from moesaic.services.attention.modes.peers import follow_placement
from moesaic.transport.frame import FrameLimits
from moesaic.transport.ucx.opening import OpenNetwork

KV_SECOND = "KV gets the memory that experts leave"
PLACING = f"a placement from the scheduler: {KV_SECOND}"
LOOK_S = 1.0  # without news: a worker may have been gone for long enough
RETURN_S = 60.0  # for workers that are gone; those that have come back are awaited for longer
log = structlog.get_logger()


async def experts_placed(worker: WorkerParts) -> None:
    """Wait until expert workers hold the experts, if the KV of a GPU gets what is left.

    One of these workers may be on the same GPU. Experts need a fixed number of bytes, and KV takes what
    there is, so KV must come second, in whatever order the processes start. Redis keeps the placement
    of processes that have ended, whose experts are in no memory. In a cluster of other weights no experts
    would ever come, so these are agreed on first; other workers then wait for this one's.
    """
    settings, process = worker.settings, worker.process
    if settings.device == "cpu" or settings.kv_blocks:
        return
    await process.agree_on_weights(settings.weights_of(worker.config.digest))
    async with watch_placement(process.bus) as view, watch_fleet(process.bus) as fleet:
        began_s, told = time.monotonic(), ""
        while True:
            placement, seen = view.current, (view.version, fleet.version)
            waited_s = time.monotonic() - began_s
            if placement is None or placement.model_digest != worker.config.digest:
                awaited = PLACING
            elif missing := awaited_workers(placement, fleet, waited_s):
                names = ", ".join(missing)
                awaited = f"{names}, with experts of epoch {placement.epoch}: {KV_SECOND}"
            else:
                return
            if awaited != told:
                log.info("kv.waiting", waiting_for=awaited)
                told = awaited
            with process.status.waiting(awaited):
                await _news(view, fleet, seen)


async def _news(view: PlacementView, fleet: Fleet, seen: tuple[int, int]) -> None:
    """Wait until one of the views is newer than ``seen``, for ``LOOK_S`` at most."""
    of_each = [
        asyncio.create_task(each.changed(version))
        for each, version in zip((view, fleet), seen, strict=True)
    ]
    try:
        await asyncio.wait(of_each, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in of_each:
            task.cancel()


def awaited_workers(placement: Placement, fleet: Fleet, waited_s: float) -> list[str]:
    """Name the workers of a placement that are to hold their experts before KV is taken; none: those there do.

    A worker that has started again will get another placement. One that is gone may come back. Nobody
    waits for that longer than ``RETURN_S``, if others of the placement serve.
    """
    missing = [each.worker_id for each in placement.workers if not _lives(each.incarnation, fleet)]
    back = any(worker_id in fleet.workers for worker_id in missing)
    gone = not back and len(missing) < len(placement.workers) and waited_s >= RETURN_S
    return [] if gone else missing


def _lives(incarnation: Incarnation, fleet: Fleet) -> bool:
    record = fleet.workers.get(incarnation[0])
    return record is not None and record.incarnation == incarnation


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
