"""The engine of a worker, and the parts that it is made of."""

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import structlog
import torch

from moesaic.classification.forms import MAX_LABELS
from moesaic.dispatch.substitution import Degrading, LoadedSubstitution
from moesaic.dispatch.tracing import StepTracer
from moesaic.engine.engine import Engine, TellBlocks
from moesaic.engine.sequences.blocks import blocks_for
from moesaic.engine.sequences.requests import Event, Request, RequestKey
from moesaic.engine.shortcuts import Shortcut
from moesaic.engine.steps.admission import EngineLimits
from moesaic.engine.steps.sweeps import MOST_SWEEPS
from moesaic.engine.thread import EngineThread
from moesaic.errors import InUse
from moesaic.kernels.warm_up import (
    MOST_ROWS,
    WARMING,
    half_promised,
    row_counts,
    warming,
    within_memory,
)
from moesaic.messages.brownout import BrownoutPolicy
from moesaic.messages.performance import LoadReport
from moesaic.models.configuration.config import ModelConfig
from moesaic.models.configuration.division import part_of
from moesaic.models.configuration.sizes import kv_bytes, numbers_for
from moesaic.models.layers.kv_cache import KVCache
from moesaic.models.layers.sweep_area import SweepArea
from moesaic.models.layers.warm_up import warm_up as warm_up_decoder
from moesaic.prefix.blocks import BLOCK_SIZE, BlockHasher, naming_key
from moesaic.services.attention.kv_room import kv_blocks_of
from moesaic.services.attention.modes.contract import Mode, WorkerParts, row_dtype
from moesaic.services.attention.settings import AttentionSettings
from moesaic.telemetry import spans
from moesaic.v1.attention_pb2 import EngineProfile

log = structlog.get_logger()

Emit = Callable[[list[Event]], None]


@dataclass(frozen=True)
class RunningEngine:
    """An engine and the thread that it lives on, for callers on the main loop."""

    engine: Engine
    thread: EngineThread

    async def run(self) -> None:
        """Compute, until cancelled."""
        await self.thread.run(self.engine.run())

    async def take_report(self) -> LoadReport:
        """Report the load since the last call."""
        return await self.thread.build(self.engine.take_report)

    def submit(self, request: Request) -> None:
        """Hand a request over."""
        self.thread.call(self.engine.submit, request)

    def cancel(self, key: RequestKey) -> None:
        """Forget a request, if there is one."""
        self.thread.call(self.engine.cancel, key)

    def set_brownout(self, policy: BrownoutPolicy) -> None:
        """Go by a policy of brownout from the next step on."""
        self.thread.call(self.engine.set_brownout, policy)

    def trace(self, tracer: StepTracer | None) -> None:
        """Show ``tracer`` the steps from now on; ``None``: nobody."""
        self.thread.call(self.engine.trace, tracer)


async def open_engine(
    worker: WorkerParts, mode: Mode, emit: Emit, tell_blocks: TellBlocks
) -> RunningEngine:
    """Make the engine of a worker.

    Args:
        worker: its parts.
        mode: computes the routed experts.
        emit: called on the main loop with the events of each step.
        tell_blocks: called there with the names of blocks that were stored, and of those evicted.

    Raises:
        InUse: KV or captured steps do not fit the memory of the device.
    """
    main_loop = asyncio.get_running_loop()

    def emit_there(events: list[Event]) -> None:
        main_loop.call_soon_threadsafe(emit, events)

    def tell_there(stored: list[bytes], evicted: list[bytes]) -> None:
        main_loop.call_soon_threadsafe(tell_blocks, stored, evicted)

    # On a GPU it captures steps, whose kernels are compiled first.
    status = worker.process.status
    with nullcontext() if worker.settings.device == "cpu" else status.waiting(WARMING):
        engine = await worker.thread.build(_engine, worker, mode, emit_there, tell_there)
    if (made := spans.current()) is not None:
        # It needs OpenTelemetry.
        from moesaic.engine.run_spans import RunSpans

        engine.observers.append(RunSpans(made, mode.dispatcher))
    return RunningEngine(engine, worker.thread)


async def warm_up(worker: WorkerParts, mode: Mode) -> None:
    """Run the kernels of later steps once; on a CPU there is nothing to compile.

    Raises:
        InvalidInput: the device has too little memory for the largest step.
    """
    settings = worker.settings
    if settings.device == "cpu":
        return
    most_rows, most_sequences = settings.max_num_batched_tokens, settings.max_num_seqs
    with worker.process.status.waiting(WARMING):
        await worker.thread.run(
            warm_up_decoder(worker.decoder, mode.experts, most_rows, most_sequences, BLOCK_SIZE)
        )


def warm_up_degraded(worker: WorkerParts, degrading: Degrading, loaded: LoadedSubstitution) -> None:
    """Run the kernels of later degraded steps once, on a thread that may compute beside the engine's.

    Without memory for it, they are compiled when such a step comes.
    """
    settings, decoder, device = worker.settings, worker.decoder, worker.device
    if settings.device == "cpu":
        return
    most_rows = min(settings.max_num_batched_tokens, MOST_ROWS)
    try:
        with warming(device, "--max-num-batched-tokens", f"a degraded step of {most_rows} rows"):
            for num_rows in row_counts(most_rows):
                rows = torch.zeros(
                    num_rows, decoder.config.hidden_size, dtype=decoder.dtype, device=device
                )
                degrading.degraded(loaded, rows, half_promised(num_rows, device))
    except InUse as error:
        log.warning("kernels.cold", cause=str(error))


def profile_of(worker: WorkerParts, slowdown: float = 0.0) -> EngineProfile:
    """Describe the engine to gateways; ``slowdown``: see ``Mode.start``."""
    settings, hasher = worker.settings, _hasher(worker)
    return EngineProfile(
        max_step_tokens=settings.max_num_batched_tokens,
        naming=hasher.naming if hasher else b"",
        slowdown=slowdown,
        sweeps_scores=not settings.store_scoring_kv,
        max_waiting_requests=settings.max_num_queued_reqs,
        max_waiting_tokens=settings.max_num_queued_tokens,
        max_running_requests=settings.max_num_seqs,
    )


def record_of(worker: WorkerParts, mode: Mode, engine: RunningEngine) -> dict[str, Any]:
    """Describe the worker to its cluster: fields of its ``WorkerRecord``."""
    return {
        "model_digest": worker.config.digest,
        "dtype": worker.settings.dtype,
        "quantization": worker.settings.quantization,
        "config_digest": worker.config.answering_digest,
        "dispatch": worker.settings.dispatch,
        "max_request_tokens": engine.engine.max_request_tokens,
        "max_num_seqs": worker.settings.max_num_seqs,
        "max_num_batched_tokens": worker.settings.max_num_batched_tokens,
        "kv_tokens": engine.engine.batcher.pool.num_blocks * BLOCK_SIZE,
        "num_experts": worker.config.moe.num_experts,
        "top_k": worker.config.moe.top_k,
        "step_target_s": worker.settings.step_target_s,
        "row_bytes": worker.config.hidden_size * row_dtype(worker.settings, worker.config).itemsize,
        "data_address": mode.data_address,
        "share": mode.share,
    }


def _engine(worker: WorkerParts, mode: Mode, emit: Emit, tell_blocks: TellBlocks) -> Engine:
    settings, config = worker.settings, worker.config
    division = worker.decoder.division
    own = part_of(config, division) if division else config
    limits = EngineLimits(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_queued_reqs=settings.max_num_queued_reqs,
        max_num_queued_tokens=settings.max_num_queued_tokens,
        max_model_len=config.max_positions,
        sweep_blocks=_sweep_blocks(settings, own),
        store_scoring_kv=settings.store_scoring_kv,
    )
    num_blocks = kv_blocks_of(settings, own)

    def shortcut(cache: KVCache) -> Shortcut | None:
        told = f"got {settings.max_num_seqs}, and captured steps of so many rows beside KV"
        fix = "lower it, or give --no-decode-graphs"
        with within_memory(worker.device, "--max-num-seqs", told, fix):
            return mode.shortcut(cache)

    num_bytes = num_blocks * BLOCK_SIZE * kv_bytes(own, numbers_for(settings, own))
    told = f"KV of {num_blocks} blocks ({num_bytes} bytes)"
    with within_memory(worker.device, "--kv-blocks", told, "give fewer, or free its memory"):
        return Engine(
            worker.decoder,
            mode.dispatcher,
            limits,
            num_blocks,
            emit,
            settings.recovery_s,
            _hasher(worker),
            tell_blocks,
            shortcut,
            settings.step_target_s,
        )


def _hasher(worker: WorkerParts) -> BlockHasher | None:
    """Names blocks; ``None`` without a prefix cache."""
    settings = worker.settings
    if not settings.enable_prefix_caching:
        return None
    key = naming_key(settings.block_secret.get_secret_value(), settings.secret.get_secret_value())
    return BlockHasher(key, worker.config.digest, BLOCK_SIZE)


def _sweep_blocks(settings: AttentionSettings, config: ModelConfig) -> int:
    block_bytes = SweepArea.block_bytes(config, row_dtype(settings, config), BLOCK_SIZE)
    # More than so many prompts of any length, with as many labels as there may be, find no use for it.
    lanes = MAX_LABELS * blocks_for(2 * BLOCK_SIZE)
    most = MOST_SWEEPS * (blocks_for(config.max_positions) + lanes)
    num_blocks = min(settings.sweep_bytes // block_bytes, most)
    max_tokens = min(num_blocks * BLOCK_SIZE, config.max_positions)
    log.info("sweeps.ready", max_tokens=max_tokens, bytes=num_blocks * block_bytes)
    return num_blocks
