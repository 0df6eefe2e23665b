"""An attention worker: builds the parts, serves, drains."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import structlog
import torch

import moesaic
from moesaic.cluster.background import background
from moesaic.cluster.bus import Bus
from moesaic.cluster.grpc_server import admin_server
from moesaic.cluster.lifecycle import run_service, stop_event
from moesaic.cluster.own_addresses import own_addresses
from moesaic.cluster.placement_view import watch_placement
from moesaic.cluster.registry import next_generation, registered
from moesaic.cluster.same_weights import same_weights
from moesaic.dispatch.choosing import ChoosingDispatcher
from moesaic.dispatch.contract import Dispatcher
from moesaic.dispatch.local import LocalDispatcher
from moesaic.dispatch.routed import RoutedDispatcher
from moesaic.engine.blocks import BLOCK_SIZE
from moesaic.engine.grammar import GrammarCompiler
from moesaic.engine.requests import Event
from moesaic.engine.thread import EngineThread, engine_thread
from moesaic.errors import NotReady
from moesaic.kernels.native.library import require_library
from moesaic.kernels.own_thread import on_own_thread
from moesaic.messages.registry import WorkerRecord
from moesaic.models.checkpoint import Checkpoint
from moesaic.models.config import ModelConfig, load_config
from moesaic.models.decoder import Decoder
from moesaic.models.gate import load_gates
from moesaic.models.weights_digest import digesting
from moesaic.prefix.block_hashes import BlockHasher, naming_key
from moesaic.telemetry.logs import configure_logging
from moesaic.telemetry.metrics import serve_metrics
from moesaic.transport.frame import FrameLimits
from moesaic.transport.ucx import UcxNetwork
from moesaic.v1 import attention_pb2_grpc
from moesaic.v1.attention_pb2 import EngineProfile
from services.attention.admin import AttentionAdmin
from services.attention.neighbours import open_exchange
from services.attention.observing import observe
from services.attention.opening import open_engine
from services.attention.peers import follow_placement
from services.attention.settings import AttentionSettings
from services.attention.streaming import Streamed, open_streamed, plan_experts
from services.attention.together import Together, open_together

log = structlog.get_logger()


async def serve(settings: AttentionSettings) -> None:
    """Serve until SIGTERM or SIGINT. The parts start top down and stop bottom up, errors or not."""
    worker_id = settings.identity("attention")
    configure_logging("attention", worker_id, settings.log_level)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    config = load_config(
        Path(settings.model)
    )  # before anything listens: a bad directory should fail at once
    checkpoint = Checkpoint.of_model(Path(settings.model), config)
    if settings.quantization != "none":
        require_library("--quantization")
    if settings.deterministic:
        require_library("--deterministic")
    plan = await on_own_thread(plan_experts, settings, config) if settings.streams_experts else None
    async with AsyncExitStack() as parts:
        stop = await parts.enter_async_context(stop_event())
        weights_digest = await parts.enter_async_context(digesting(checkpoint.files))
        settings = await parts.enter_async_context(own_addresses(settings))
        compiler = GrammarCompiler(Path(settings.model), config.vocab_size, config.eos_token_ids)
        service = AttentionAdmin(config, compiler)
        admin = await parts.enter_async_context(
            admin_server(
                settings,
                "attention",
                worker_id=worker_id,
                stop=stop,
                register=lambda server: attention_pb2_grpc.add_AttentionServiceServicer_to_server(
                    service, server
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
        admin.status.model = settings.name_of_model
        thread = await parts.enter_async_context(engine_thread(torch.device(settings.device)))
        main_loop = asyncio.get_running_loop()

        def emit(events: list[Event]) -> None:
            main_loop.call_soon_threadsafe(service.deliver, events)

        def tell_blocks(stored: list[bytes], evicted: list[bytes]) -> None:
            main_loop.call_soon_threadsafe(service.deliver_blocks, stored, evicted)

        decoder = await on_own_thread(
            Decoder.load,
            checkpoint,
            config,
            getattr(torch, settings.dtype),
            torch.device(settings.device),
            settings.quantization,
        )
        config = replace(config, weights_digest=await weights_digest)
        admin.status.model_digest = config.digest
        shared: Streamed | Together | None = None  # experts shared with other attention workers
        named = settings.model_copy(update={"worker_id": worker_id})
        if settings.dispatch == "all-to-all":
            shared = await open_together(named, config, checkpoint, thread, parts)
        elif plan is not None:
            shared = await open_streamed(named, config, plan, checkpoint, parts)
        gathering = ""  # where rows of the node's other attention workers are received
        if shared is None or settings.dispatch == "routed":
            dispatcher = await _open_dispatcher(
                settings, worker_id, config, checkpoint, bus, thread, parts
            )
            if isinstance(dispatcher, RoutedDispatcher) and shared is None:
                gathering = await open_exchange(
                    named, config.digest, bus, thread, dispatcher, parts
                )
            if shared is not None:
                num_layers = len(config.moe_layers)
                dispatcher = ChoosingDispatcher(dispatcher, shared.dispatcher, num_layers)
        else:
            dispatcher = shared.dispatcher
        hasher = _hasher(settings, config)
        engine = await thread.run(
            open_engine(settings, config, decoder, dispatcher, emit, hasher, tell_blocks)
        )
        service.attach(
            config,
            thread,
            engine,
            _profile(settings, hasher),
            lambda: load_gates(
                checkpoint, config, getattr(torch, settings.dtype), torch.device(settings.device)
            ),
        )
        parts.callback(service.detach)
        lease = await parts.enter_async_context(
            registered(
                bus,
                WorkerRecord(
                    worker_id=worker_id,
                    generation=generation,
                    role="attention",
                    state="starting",
                    admin_address=admin.address,
                    metrics_address=metrics_address,
                    node=settings.node_name,
                    version=moesaic.__version__,
                    model_digest=config.digest,
                    config_digest=config.config_digest,
                    dispatch=settings.dispatch,
                    max_request_tokens=engine.max_request_tokens,
                    data_address=shared.data_address if shared else gathering,
                    share=shared.share if shared else "",
                ),
            )
        )
        await parts.enter_async_context(same_weights(bus, config.digest, admin.status.waiting_for))
        if shared is not None:
            admin.status.data_address = shared.data_address
            slowdown = await shared.start(bus, thread, decoder, admin.status.waiting_for)
            if (
                settings.dispatch != "routed"
            ):  # else a step that transfers would slow goes another way
                service.describe(_profile(settings, hasher, slowdown))
        async with asyncio.TaskGroup() as tasks:
            stepping = tasks.create_task(thread.run(engine.run()))
            watching = tasks.create_task(observe(service, admin.status, thread, engine))
            await lease.update(state="ready")
            admin.status.set_state("ready")
            log.info("worker.ready", dispatch=settings.dispatch, generation=generation)

            async def drain(on: bool) -> None:
                service.draining = on
                await lease.update(state="draining" if on else "ready")

            admin.on_drain(drain)
            await stop.wait()
            admin.status.set_state("draining")
            await drain(True)
            log.info("worker.draining", open=service.num_open)
            await _finish_running(service, admin.grace_s)
            stepping.cancel()
            watching.cancel()


async def _open_dispatcher(
    settings: AttentionSettings,
    worker_id: str,
    config: ModelConfig,
    checkpoint: Checkpoint,
    bus: Bus,
    thread: EngineThread,
    parts: AsyncExitStack,
) -> Dispatcher:
    dtype, device = getattr(torch, settings.dtype), torch.device(settings.device)
    if settings.dispatch == "local":
        return await on_own_thread(
            LocalDispatcher, checkpoint, config, dtype, device, settings.quantization
        )
    gates = await on_own_thread(load_gates, checkpoint, config, dtype, device)

    async def connect() -> tuple[UcxNetwork, RoutedDispatcher]:
        network = UcxNetwork(
            worker_id,
            "attention",
            settings.secret.get_secret_value().encode(),
            FrameLimits.of_hidden_size(config.hidden_size),
            transports=settings.transports,
            own_address=settings.data.host,
        )
        return network, RoutedDispatcher(
            network,
            gates,
            settings.expert_timeout_s,
            settings.expert_scheduling,
            deterministic=settings.deterministic,
        )

    network, dispatcher = await thread.run(connect())
    parts.push_async_callback(lambda: thread.run(network.close()))
    parts.push_async_callback(lambda: thread.run(dispatcher.close()))
    view = await parts.enter_async_context(watch_placement(bus))
    follow = follow_placement(view, thread, dispatcher, config.digest)
    await parts.enter_async_context(background(follow, "placements"))
    return dispatcher


def _hasher(settings: AttentionSettings, config: ModelConfig) -> BlockHasher | None:
    """What names blocks; none without a prefix cache."""
    if not settings.enable_prefix_caching:
        return None
    key = naming_key(settings.block_secret.get_secret_value(), settings.secret.get_secret_value())
    return BlockHasher(key, config.digest, BLOCK_SIZE)


def _profile(
    settings: AttentionSettings, hasher: BlockHasher | None, slowdown: float = 0.0
) -> EngineProfile:
    return EngineProfile(
        max_step_tokens=settings.max_num_batched_tokens,
        naming=hasher.naming if hasher else b"",
        slowdown=slowdown,
        sweeps_scores=not settings.store_scoring_kv,
    )


async def _finish_running(service: AttentionAdmin, grace_s: float) -> None:
    try:
        async with asyncio.timeout(grace_s):
            await service.idle.wait()
    except TimeoutError:
        service.fail_open(NotReady("this attention worker stopped", code="draining"))


def run(settings: AttentionSettings) -> None:
    """Serve in this process, to its end."""
    run_service(serve(settings))
