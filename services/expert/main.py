"""An expert worker: builds the parts, serves, drains."""

import asyncio
import socket
from contextlib import AsyncExitStack
from pathlib import Path

import structlog
import torch

import moesaic
from moesaic.cluster.bus import Bus
from moesaic.cluster.grpc_server import AdminServer, admin_server
from moesaic.cluster.lifecycle import run_service, stop_event
from moesaic.cluster.registry import next_generation, registered
from moesaic.dispatch.host import ExpertHost
from moesaic.engine.thread import engine_thread
from moesaic.messages.registry import WorkerRecord
from moesaic.models.checkpoint import Checkpoint
from moesaic.models.config import load_config
from moesaic.settings import load_settings
from moesaic.telemetry.logs import configure_logging
from moesaic.telemetry.metrics import serve_metrics
from moesaic.transport.frame import FrameLimits
from moesaic.transport.ucx import UcxNetwork
from moesaic.v1 import expert_pb2_grpc
from services.expert.admin import ExpertAdmin
from services.expert.settings import ExpertSettings

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
    slots = settings.slots_per_layer or config.moe.num_experts
    async with AsyncExitStack() as parts:
        stop = await parts.enter_async_context(stop_event())
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
        metrics_address = serve_metrics(settings.host, settings.metrics_port)
        bus = await parts.enter_async_context(Bus.connect(settings.redis_url, settings.cluster))
        generation = admin.status.generation = await next_generation(bus, worker_id)
        thread = await parts.enter_async_context(engine_thread())
        checkpoint = Checkpoint(Path(settings.model))
        host = await asyncio.to_thread(
            ExpertHost,
            checkpoint,
            config,
            worker_id,
            slots,
            getattr(torch, settings.dtype),
            torch.device(settings.device),
        )
        admin_service.host = host

        async def listen() -> tuple[UcxNetwork, str]:
            network = UcxNetwork(
                worker_id,
                "expert",
                settings.secret.get_secret_value().encode(),
                FrameLimits.of_hidden_size(config.hidden_size),
                transports=settings.transports,
            )
            return network, await network.listen(settings.host, settings.data_port, host.answer)

        network, data_address = await thread.run(listen())
        parts.push_async_callback(lambda: thread.run(network.close()))
        data_address = f"{settings.reachable_host}:{data_address.rsplit(':', 1)[1]}"
        admin.status.data_address, admin.status.model_digest = data_address, config.digest
        await parts.enter_async_context(
            registered(
                bus,
                WorkerRecord(
                    worker_id=worker_id,
                    generation=generation,
                    role="expert",
                    state="ready",
                    admin_address=admin.address,
                    data_address=data_address,
                    metrics_address=metrics_address,
                    node=socket.gethostname(),
                    version=moesaic.__version__,
                    model_digest=config.digest,
                    slots_per_layer=slots,
                    num_experts=config.moe.num_experts,
                    layers=list(config.moe_layers),
                ),
            )
        )
        admin.status.set_state("ready")
        log.info(
            "worker.ready", data_address=data_address, slots_per_layer=slots, generation=generation
        )
        keeper = asyncio.create_task(_keep_house(host, admin))
        parts.callback(keeper.cancel)
        await stop.wait()
        admin.status.set_state("draining")
        log.info("worker.draining")


async def _keep_house(host: ExpertHost, admin: AdminServer) -> None:
    """Retire old epochs, and show the epoch in force."""
    while True:
        host.retire()
        admin.status.epoch = host.epoch
        admin.status.waiting_for = [] if host.epoch else ["a placement from the scheduler"]
        await asyncio.sleep(RETIRE_EVERY_S)


def main() -> None:
    """Entry point of ``moesaic-expert``."""
    run_service(serve(load_settings(ExpertSettings)))
