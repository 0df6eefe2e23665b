"""An expert worker: builds the parts, serves, drains."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import structlog
import torch

import moesaic
from moesaic.cluster.background import background
from moesaic.cluster.bus import Bus
from moesaic.cluster.grpc_server import AdminServer, admin_server
from moesaic.cluster.lifecycle import run_service, stop_event
from moesaic.cluster.own_addresses import own_addresses
from moesaic.cluster.registry import next_generation, registered
from moesaic.cluster.same_weights import same_weights
from moesaic.dispatch.exchange.relay import ExpertRelay
from moesaic.dispatch.host import ExpertHost
from moesaic.dispatch.ridge import measure_ridge
from moesaic.engine.thread import EngineThread, engine_thread
from moesaic.kernels.native.library import require_library
from moesaic.kernels.own_thread import on_own_thread
from moesaic.messages.registry import WorkerRecord
from moesaic.models.checkpoint import Checkpoint
from moesaic.models.config import load_config
from moesaic.models.weights_digest import digesting
from moesaic.telemetry.logs import configure_logging
from moesaic.telemetry.metrics import serve_metrics
from moesaic.transport.frame import FrameLimits
from moesaic.transport.ucx import UcxNetwork
from moesaic.v1 import expert_pb2_grpc
from services.expert.activations import ActivationReporter
from services.expert.admin import ExpertAdmin
from services.expert.settings import ExpertSettings
from services.expert.weights import exchange_experts

log = structlog.get_logger()

RETIRE_EVERY_S = 2.0


async def serve(settings: ExpertSettings) -> None:
    """Serve until SIGTERM or SIGINT. The parts start top down and stop bottom up, errors or not."""
    worker_id = settings.identity("expert")
    configure_logging("expert", worker_id, settings.log_level)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    config = load_config(
        Path(settings.model)
    )  # before anything listens: a bad directory should fail at once
    checkpoint = Checkpoint.of_model(Path(settings.model), config)
    slots = settings.slots_per_layer or config.moe.num_experts
    if settings.quantization != "none":
        require_library("--quantization")
    async with AsyncExitStack() as parts:
        stop = await parts.enter_async_context(stop_event())
        weights_digest = await parts.enter_async_context(digesting(checkpoint.files))
        settings = await parts.enter_async_context(own_addresses(settings))
        admin_service = ExpertAdmin()
        admin = await parts.enter_async_context(
            admin_server(
                settings,
                "expert",
                worker_id=worker_id,
                stop=stop,
                register=lambda server: expert_pb2_grpc.add_ExpertServiceServicer_to_server(
                    admin_service, server
                ),
            )
        )
        metrics_address = admin.status.metrics_address = settings.control.advertised(
            serve_metrics(settings.control.host, settings.metrics_port)
        )
        bus = await parts.enter_async_context(
            Bus.connect(settings.redis_url, settings.cluster, admin.status.waiting_for)
        )
        generation = admin.status.generation = await next_generation(bus, worker_id)
        thread = await parts.enter_async_context(engine_thread(torch.device(settings.device)))
        ridge_rows = await on_own_thread(
            measure_ridge,
            config,
            getattr(torch, settings.dtype),
            torch.device(settings.device),
            settings.quantization,
        )
        config = replace(config, weights_digest=await weights_digest)
        admin.status.model_digest = config.digest
        host = await on_own_thread(
            ExpertHost,
            checkpoint,
            config,
            worker_id,
            slots,
            getattr(torch, settings.dtype),
            torch.device(settings.device),
            settings.quantization,
            settings.max_expert_bytes,
        )
        admin_service.host = host

        async def listen() -> tuple[UcxNetwork, ExpertRelay, str]:
            network = UcxNetwork(
                worker_id,
                "expert",
                settings.secret.get_secret_value().encode(),
                FrameLimits.of_hidden_size(config.hidden_size),
                transports=settings.transports,
                own_address=settings.data.host,
            )
            relay = ExpertRelay(worker_id, network, host.answer, host.placement)
            where = await network.listen(settings.data.host, settings.data_port, relay.answer)
            return network, relay, where

        network, relay, data_address = await thread.run(listen())
        parts.push_async_callback(lambda: thread.run(network.close()))
        parts.push_async_callback(lambda: thread.run(relay.close()))
        data_address = settings.data.advertised(data_address)
        weights_address, admin_service.peers = await exchange_experts(
            settings, worker_id, config, host, parts
        )
        parts.push_async_callback(admin_service.close)
        admin.status.data_address = data_address
        admin.status.model = settings.name_of_model
        lease = await parts.enter_async_context(
            registered(
                bus,
                WorkerRecord(
                    worker_id=worker_id,
                    generation=generation,
                    role="expert",
                    state="starting",
                    admin_address=admin.address,
                    data_address=data_address,
                    weights_address=weights_address,
                    metrics_address=metrics_address,
                    node=settings.node_name,
                    version=moesaic.__version__,
                    model_digest=config.digest,
                    config_digest=config.config_digest,
                    slots_per_layer=slots,
                    ridge_rows=ridge_rows,
                    num_experts=config.moe.num_experts,
                    layers=list(config.moe_layers),
                    expert_bytes=host.files.expert_bytes,
                    max_expert_bytes=settings.max_expert_bytes,
                ),
            )
        )

        await parts.enter_async_context(same_weights(bus, config.digest, admin.status.waiting_for))

        async def drain(on: bool) -> None:
            await lease.update(state="draining" if on else "ready")

        admin.on_drain(drain)
        admin.status.set_state("ready")
        await lease.update(state=admin.status.state)  # it may have been told to drain meanwhile
        log.info(
            "worker.ready",
            data_address=data_address,
            slots_per_layer=slots,
            ridge_rows=ridge_rows,
            generation=generation,
        )
        await parts.enter_async_context(
            background(_keep_house(host, admin, thread, relay), "housekeeping")
        )
        reporter = admin_service.reporter = ActivationReporter(
            bus, host, worker_id, generation, config.digest, settings.activation_window_s
        )
        await parts.enter_async_context(background(reporter.run(), "activations"))
        await stop.wait()
        admin.status.set_state("draining")
        await drain(True)
        placement = host.placement(host.epoch)
        colleagues = [w.worker_id for w in placement.workers] if placement else []
        await thread.run(_serve_out(network, colleagues, admin.grace_s))


async def _serve_out(network: UcxNetwork, colleagues: list[str], grace_s: float) -> None:
    """Serve until the attention workers have switched to a placement without this worker, or have
    gone themselves; on the engine thread. Expert workers come only for attention workers."""
    log.info("worker.draining", peers=network.served_peers, grace_s=grace_s)
    try:
        async with asyncio.timeout(grace_s):
            await network.all_left(besides=colleagues)
    except TimeoutError:
        log.warning("grace.over", peers=network.served_peers)


async def _keep_house(
    host: ExpertHost, admin: AdminServer, thread: EngineThread, relay: ExpertRelay
) -> None:
    """Retire old epochs, and show the epoch in force."""
    while True:
        host.retire()
        thread.call(relay.follow, host.placement(host.epoch))
        admin.status.epoch = host.epoch
        admin.status.waiting_for = [] if host.epoch else ["a placement from the scheduler"]
        await asyncio.sleep(RETIRE_EVERY_S)


def run(settings: ExpertSettings) -> None:
    """Serve in this process, to its end."""
    run_service(serve(settings))
