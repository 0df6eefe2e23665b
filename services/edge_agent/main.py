"""An edge agent: builds the parts, serves, drains."""

import asyncio
import sys
from dataclasses import replace
from functools import partial
from typing import Any, cast

import grpc
import structlog

from moesaic.cluster.background import background, tended
from moesaic.cluster.lifecycle import run_service, stop_event
from moesaic.cluster.registry import Lease
from moesaic.cluster.rpc.admin import ServiceStatus
from moesaic.cluster.service import Availability, Process, introduce, service
from moesaic.models.weights.digest import digesting
from moesaic.models.weights.served import with_own_dtype
from moesaic.native.heap import keep_heap_small
from moesaic.services.attention.admin import AttentionAdmin
from moesaic.services.attention.brownout import follow_policy, tell_decisions
from moesaic.services.attention.engine import (
    RunningEngine,
    open_engine,
    profile_of,
    record_of,
    warm_up,
)
from moesaic.services.attention.loading import find_model, load_worker
from moesaic.services.attention.modes.contract import WorkerParts
from moesaic.services.attention.observing import observe
from moesaic.services.attention.settings import AttentionSettings
from moesaic.services.attention.substitution import SubstitutionFollower
from moesaic.services.edge_agent.admin import EdgeAdmin
from moesaic.services.edge_agent.leaving import hand_over
from moesaic.services.edge_agent.limit import MemoryLimit
from moesaic.services.edge_agent.profile import Profiler, tell_profiles
from moesaic.services.edge_agent.settings import EdgeAgentSettings
from moesaic.services.edge_agent.site import Site, limited, open_site
from moesaic.services.expert.activations import ActivationReporter
from moesaic.services.expert.admin import ExpertAdmin
from moesaic.services.expert.weights import give_experts
from moesaic.telemetry.memory import own_bytes
from moesaic.v1 import attention_pb2_grpc, edge_agent_pb2_grpc, expert_pb2_grpc

log = structlog.get_logger()

RETIRE_EVERY_S = 0.25  # a stage of a migration waits for it
SWITCH_S = 2e-4  # the engine and whoever answers other sites are threads of one interpreter


async def serve(settings: EdgeAgentSettings) -> None:
    """Serve until SIGTERM or SIGINT. The parts start top down and stop bottom up, errors or not."""
    keep_heap_small()
    sys.setswitchinterval(SWITCH_S)
    identity = introduce(settings, "edge-agent")
    config, checkpoint = find_model(settings)
    settings = with_own_dtype(settings, config)
    api, experts, edge = AttentionAdmin(config, checkpoint.directory), ExpertAdmin(), EdgeAdmin()

    def register(server: grpc.aio.Server) -> None:
        attention_pb2_grpc.add_AttentionServiceServicer_to_server(api, server)
        expert_pb2_grpc.add_ExpertServiceServicer_to_server(experts, server)
        edge_agent_pb2_grpc.add_EdgeAgentServiceServicer_to_server(edge, server)

    async with (
        stop_event() as stop,
        digesting(checkpoint.files) as weights_digest,
        service(settings, identity, register, stop) as process,
    ):
        settings, process.status.model = process.settings, settings.name_of_model
        before_bytes = own_bytes()
        as_attention = cast("Process[AttentionSettings]", process)
        worker = await load_worker(as_attention, config, checkpoint, weights_digest)
        site = await open_site(worker, settings)
        weights_address, experts.peers = await give_experts(
            settings, settings.weights_port, worker.config, site.host, process.parts
        )
        process.status.weights_address = weights_address
        experts.host = site.host
        process.parts.push_async_callback(experts.close)
        await process.enter(background(experts.until_damaged(), "checkpoint"))
        worker = limited(site, worker, settings, before_bytes)
        engine = await open_engine(
            worker, site.mode, api.requests.deliver, api.streams.change_blocks
        )
        site.plan = replace(site.plan, kv_blocks=engine.engine.batcher.pool.num_blocks)
        api.attach(worker.config, engine, profile_of(worker), worker.load_gates)
        process.parts.callback(api.detach)
        record = record_of(worker, site.mode, engine) | _record_of(worker, settings, site)
        lease = await process.registered("starting", weights_address=weights_address, **record)
        await process.agree_on_weights(worker.settings.weights_of(worker.config.digest))
        process.status.data_address = site.mode.data_address
        await warm_up(worker, site.mode)
        await process.enter(background(engine.run(), "engine"))
        profiler = Profiler(
            site, settings.site_name, settings.worker_id, process.generation, before_bytes
        )
        await _begin_reports(process, worker, engine, profiler)
        await process.enter(background(observe(api, process.status, engine), "observe"))
        house = _keep_house(profiler, process.status, lease)
        await process.enter(background(house, "housekeeping"))
        limit = MemoryLimit(profiler, lease)
        await process.enter(background(limit.keep(), "memory"))
        edge.open(profiler, limit.set)
        availability = Availability(process, lease, api.drain)
        await availability.begin()
        log.info("agent.ready", site=settings.site_name, generation=process.generation)
        await availability.ended()
        grace_s = process.admin.grace_s
        handing_over = hand_over(process.bus, settings.worker_id, grace_s)
        _, handed_over = await asyncio.gather(api.finish(grace_s), handing_over)
        if handed_over:
            await site.left()


async def _begin_reports(
    process: Process[EdgeAgentSettings],
    worker: WorkerParts,
    engine: RunningEngine,
    profiler: Profiler,
) -> None:
    """Follow the policy of brownout, and report profiles to the scheduler."""
    settings, site, bus = process.settings, profiler.site, process.bus
    substitutions = SubstitutionFollower(site.mode.degrading, worker.thread)
    await process.enter(tended(partial(follow_policy, bus, engine, substitutions), "brownout"))
    worker_id, generation = settings.worker_id, process.generation
    telling = partial(tell_decisions, bus, engine, worker_id, generation)
    await process.enter(tended(telling, "brownout decisions"))
    reporter = ActivationReporter(
        bus,
        site.meter,
        site.host.epochs,
        worker_id,
        generation,
        worker.config.digest,
        settings.activation_window_s,
        settings.expert_load_series,
    )
    await process.enter(tended(reporter.run, "activations"))
    telling_profiles = partial(tell_profiles, bus, profiler, settings.activation_window_s)
    await process.enter(tended(telling_profiles, "profiles"))


def _record_of(worker: WorkerParts, settings: EdgeAgentSettings, site: Site) -> dict[str, Any]:
    """Describe the experts of the agent to its cluster: further fields of its ``WorkerRecord``."""
    config = worker.config
    return {
        "num_experts": config.moe.num_experts,
        "layers": list(config.moe_layers),
        "slots_per_layer": config.moe.num_experts,
        "num_slots": site.plan.num_slots,
        "expert_bytes": site.host.files.expert_bytes,
        "max_expert_bytes": site.allowed_bytes,
        "united": site.host.files.experts.digests,
        "site": settings.site_name,
    }


async def _keep_house(profiler: Profiler, status: ServiceStatus, lease: Lease) -> None:
    """Retire old epochs, and show the one in force."""
    site = profiler.site
    while True:
        status.epoch = max(status.epoch, site.host.epochs.in_force)
        # On another thread: it waits for a request that is being answered.
        await asyncio.to_thread(site.host.retire)
        site.thread.call(site.dispatcher.follow)
        if site.follow_experts():
            await lease.update(max_expert_bytes=site.allowed_bytes)
        await asyncio.sleep(RETIRE_EVERY_S)


def run(settings: EdgeAgentSettings) -> None:
    """Serve in this process, to its end."""
    run_service(serve(settings))
