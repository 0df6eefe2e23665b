"""An expert worker: builds the parts, serves, drains."""

import asyncio
from dataclasses import replace
from functools import partial
from typing import Any

import structlog
import torch

from moesaic.cluster.background import background, tended
from moesaic.cluster.lifecycle import run_service, stop_event
from moesaic.cluster.load_view import report_load
from moesaic.cluster.placement_view import watch_placement
from moesaic.cluster.registry import Lease
from moesaic.cluster.rpc.server import ServiceStatus
from moesaic.cluster.service import Availability, Process, introduce, service
from moesaic.dispatch.two_phase.relay import ExpertRelay
from moesaic.engine.thread import EngineThread, engine_thread
from moesaic.experts.costs import experts_cost, measure_experts, ridge_of
from moesaic.experts.host import ExpertHost
from moesaic.experts.loaded import layout_of
from moesaic.kernels.warm_up import WARMING
from moesaic.models.configuration.config import ModelConfig
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.models.weights.digest import digesting
from moesaic.models.weights.served import find_served_model, held_dtype, with_own_dtype
from moesaic.native.library import computes_on
from moesaic.native.own_thread import on_own_thread
from moesaic.services.expert.activations import ActivationReporter
from moesaic.services.expert.admin import ExpertAdmin
from moesaic.services.expert.resting import resting
from moesaic.services.expert.room import SlotRoom, slot_room_of
from moesaic.services.expert.settings import ExpertSettings
from moesaic.services.expert.weights import give_experts
from moesaic.transport.device_memory import device_named, memory_of
from moesaic.transport.frame import FrameLimits
from moesaic.transport.ucx.network import UcxNetwork
from moesaic.transport.ucx.opening import OpenNetwork, open_network
from moesaic.v1 import expert_pb2_grpc

log = structlog.get_logger()

# Rates of `moesaic status` are of half a second, and need a count within it.
RETIRE_EVERY_S = 0.25


async def serve(settings: ExpertSettings) -> None:
    """Serve until SIGTERM or SIGINT. The parts start top down and stop bottom up, errors or not."""
    identity = introduce(settings, "expert")
    config, checkpoint = find_served_model(settings)
    settings = with_own_dtype(settings, config)
    api = ExpertAdmin()
    register = partial(expert_pb2_grpc.add_ExpertServiceServicer_to_server, api)
    async with (
        stop_event() as stop,
        digesting(checkpoint.files) as weights_digest,
        service(settings, identity, register, stop) as process,
    ):
        settings, status = process.settings, process.status
        status.progress = checkpoint.progress
        thread = await process.enter(engine_thread(device_named(settings.device)))
        measured = await on_own_thread(
            measure_experts, config, *_numbers(settings, config), settings.quantization
        )
        config = replace(config, weights_digest=await weights_digest)
        status.model_digest, status.model = config.digest, settings.name_of_model
        room = _room_of(settings, config)
        host = api.host = await _open_host(settings, config, checkpoint, room)
        host.know_costs(measured)
        network, relay = await _open_relay(process, config, host, thread)
        weights_address, api.peers = await give_experts(
            settings, settings.weights_port, config, host, process.parts
        )
        status.weights_address = weights_address
        process.parts.push_async_callback(api.close)
        await process.enter(background(api.until_damaged(), "checkpoint"))
        found = {
            "data_address": status.data_address,
            "slots_per_layer": room.slots_per_layer,
            "max_expert_bytes": room.max_expert_bytes,
            "ridge_rows": ridge_of(experts_cost(measured)),
        }
        record = _record_of(settings, config, host)
        lease = await process.registered(
            "starting", weights_address=weights_address, **found, **record
        )
        await process.agree_on_weights(settings.weights_of(config.digest))
        await warm_kernels(process, host, thread)
        view = await process.enter(watch_placement(process.bus))
        idle = resting(settings.worker_id, view, host, network.network, thread)
        availability = Availability(process, lease, idle=idle)
        await availability.begin(standby=settings.standby)
        log.info("worker.ready", **found, generation=process.generation)
        housekeeping = _keep_house(host, status, thread, relay, room, lease)
        await process.enter(background(housekeeping, "housekeeping"))
        api.reporter = ActivationReporter(
            process.bus,
            host.activations,
            host.epochs,
            settings.worker_id,
            process.generation,
            config.digest,
            settings.activation_window_s,
            settings.expert_load_series,
        )
        await process.enter(tended(api.reporter.run, "activations"))
        reporting = partial(
            report_load,
            process.bus,
            identity,
            process.generation,
            partial(asyncio.to_thread, host.take_report),
        )
        await process.enter(tended(reporting, "load"))
        await availability.ended()
        placement = host.epochs.placement(host.epochs.in_force)
        colleagues = [w.worker_id for w in placement.workers] if placement else []
        await thread.run(_serve_out(network.network, colleagues, process.admin.grace_s))


def _room_of(settings: ExpertSettings, config: ModelConfig) -> SlotRoom:
    dtype, device = _numbers(settings, config)
    as_stored = device.type != "cpu"
    layout = layout_of(config, dtype, settings.quantization, as_stored=as_stored)
    return slot_room_of(settings, config, layout.nbytes, memory_of(device))


async def _open_host(
    settings: ExpertSettings, config: ModelConfig, checkpoint: Checkpoint, room: SlotRoom
) -> ExpertHost:
    return await on_own_thread(
        ExpertHost,
        checkpoint,
        config,
        settings.worker_id,
        room.slots_per_layer,
        *_numbers(settings, config),
        settings.quantization,
        room.max_expert_bytes,
    )


async def _open_relay(
    process: Process[ExpertSettings], config: ModelConfig, host: ExpertHost, thread: EngineThread
) -> tuple[OpenNetwork, ExpertRelay]:
    """Answer attention workers and colleagues on ``thread`` until the process ends."""
    settings, limits = process.settings, FrameLimits.of_hidden_size(config.hidden_size)
    device = device_named(settings.device)
    network = await process.enter(
        open_network(settings, "expert", config.digest, limits, thread.run, device)
    )
    relay = await thread.build(
        ExpertRelay, settings.worker_id, network.network, host.answers.answer, host.epochs.placement
    )
    if computes_on(device):
        answers = host.answer_without_python(limits)
        await thread.build(network.network.answer_by, answers.c)
    process.status.data_address = await network.listen(settings.data_port, relay.answer)
    process.parts.push_async_callback(lambda: thread.run(relay.close()))
    return network, relay


async def warm_kernels(
    process: Process[ExpertSettings], host: ExpertHost, thread: EngineThread
) -> None:
    """Run the kernels of later batches once; on a CPU there is nothing to compile."""
    if process.settings.device == "cpu":
        return
    with process.status.waiting(WARMING):
        await thread.run(host.warm_up.run())


def _record_of(settings: ExpertSettings, config: ModelConfig, host: ExpertHost) -> dict[str, Any]:
    """Describe the worker to its cluster: fields of its ``WorkerRecord`` that are known at once."""
    return {
        "model_digest": config.digest,
        "dtype": settings.dtype,
        "quantization": settings.quantization,
        "config_digest": config.config_digest,
        "num_experts": config.moe.num_experts,
        "layers": list(config.moe_layers),
        "expert_bytes": host.files.expert_bytes,
        "united": host.files.experts.digests,
    }


def _numbers(settings: ExpertSettings, config: ModelConfig) -> tuple[torch.dtype, torch.device]:
    return held_dtype(settings, config), device_named(settings.device)


async def _serve_out(network: UcxNetwork, colleagues: list[str], grace_s: float) -> None:
    """Serve until attention workers have left, for a placement without this worker or altogether.

    Runs on the engine thread. ``colleagues``, the other expert workers, come only for attention
    workers: they are not waited for.
    """
    log.info("worker.draining", peers=network.served_peers, grace_s=grace_s)
    try:
        async with asyncio.timeout(grace_s):
            await network.all_left(besides=colleagues)
    except TimeoutError:
        log.warning("grace.over", peers=network.served_peers)


async def _keep_house(
    host: ExpertHost,
    status: ServiceStatus,
    thread: EngineThread,
    relay: ExpertRelay,
    room: SlotRoom,
    lease: Lease,
) -> None:
    """Retire old epochs, count answers, show the epoch in force, and offer no more slots than fit."""
    while True:
        # On another thread: it waits for a request that is being answered.
        await asyncio.to_thread(host.retire)
        room = await offer_what_fits(host, room, lease)
        host.answers.count()
        # And has no colleagues to keep links to.
        rests = status.state == "standby"
        placement = None if rests else host.epochs.placement(host.epochs.in_force)
        thread.call(relay.follow, placement)
        status.epoch = host.epochs.in_force
        placed = rests or host.epochs.in_force
        status.waiting_for = [] if placed else ["a placement from the scheduler"]
        await asyncio.sleep(RETIRE_EVERY_S)


async def offer_what_fits(host: ExpertHost, room: SlotRoom, lease: Lease) -> SlotRoom:
    """Offer the scheduler fewer slots if the first placement did not fit; later ones leave the slots in use."""
    lowered = room.lowered(0 if host.epochs.in_force else host.loader.fitted_bytes)
    if lowered != room:
        slots, limit = lowered.slots_per_layer, lowered.max_expert_bytes
        host.loader.slots_per_layer, host.loader.max_expert_bytes = slots, limit
        log.warning("slots.lowered", slots_per_layer=slots, max_expert_bytes=limit)
        await lease.update(slots_per_layer=slots, max_expert_bytes=limit)
    return lowered


def run(settings: ExpertSettings) -> None:
    """Serve in this process, to its end."""
    run_service(serve(settings))
