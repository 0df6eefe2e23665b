"""Experts that come layer by layer: what ``gathered`` and ``offload`` have in common."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

import structlog

from moesaic.dispatch.gathered import metrics
from moesaic.dispatch.gathered.assembly import GatheredParts, assemble
from moesaic.dispatch.gathered.device import CudaStreams
from moesaic.dispatch.gathered.dispatcher import GatheredDispatcher
from moesaic.dispatch.gathered.measure import calibrate
from moesaic.dispatch.gathered.plan import GatherPlan, plan_gather
from moesaic.engine.thread import EngineThread, engine_thread
from moesaic.experts.loaded import ExpertFiles, layout_of
from moesaic.experts.pull.ranges import Share
from moesaic.kernels.warm_up import within_memory
from moesaic.models.configuration.config import ModelConfig
from moesaic.models.configuration.flops import step_flops
from moesaic.models.weights.served import held_dtype
from moesaic.native.compile import cache_directory
from moesaic.native.own_thread import on_own_thread
from moesaic.services.attention.modes.contract import WorkerParts
from moesaic.services.attention.settings import AttentionSettings
from moesaic.transport.ucx.opening import OpenNetwork

log = structlog.get_logger()

THE_WHOLE = Share()


@dataclass(frozen=True)
class Gathered:
    """Experts that come to this worker.

    Attributes:
        parts: what holds, moves and computes them.
        mover: the thread that transfers run on.
    """

    parts: GatheredParts
    mover: EngineThread

    @property
    def dispatcher(self) -> GatheredDispatcher:
        """The engine's side."""
        return self.parts.dispatcher

    async def complete(self, worker: WorkerParts, others: str) -> None:
        """Wait until every expert can be had, for ``--recovery-s`` at most.

        Args:
            worker: says meanwhile what it waits for.
            others: the holders, for people.
        """
        holders, waiting_for = self.parts.holders, worker.process.status.waiting_for
        # Of a worker that has a network.
        assert holders is not None
        waiting_for.append(others)
        try:
            async with asyncio.timeout(worker.settings.recovery_s):
                await self.mover.run(holders.complete())
        except TimeoutError:
            log.warning("peers.missing", shares=[str(share) for share in holders.missing])
        finally:
            waiting_for.pop()


def plan_experts(
    settings: AttentionSettings,
    config: ModelConfig,
    share: Share = THE_WHOLE,
) -> GatherPlan:
    """Plan the memory for experts before any is taken.

    Args:
        settings: the bound of memory, and the device that computes.
        config: of the model.
        share: the experts that this worker holds.

    Raises:
        InvalidInput: it takes more memory than was given.
    """
    dtype, on_device = held_dtype(settings, config), settings.device != "cpu"
    plan = plan_gather(
        config.moe_layers,
        config.moe.num_experts,
        layout_of(config, dtype, settings.quantization, as_stored=on_device).nbytes,
        share=share,
        offload=settings.offload,
        budget_bytes=settings.expert_memory_bytes,
        on_device=on_device,
    )
    log.info(
        "gather.planned",
        total_bytes=plan.total_bytes,
        host_bytes=plan.host_bytes,
        resident_instead_bytes=plan.resident_bytes,
        first_layer_bytes=plan.layer_bytes,
        share_bytes=plan.shard_bytes,
        ring_bytes=plan.ring_bytes,
        buffer_bytes=plan.buffer_bytes,
        message_bytes=plan.message_bytes,
        file_bytes=plan.file_bytes,
    )
    return plan


async def open_mover(worker: WorkerParts) -> EngineThread:
    """Start the thread that transfers run on."""
    return await worker.process.enter(engine_thread(worker.device, "mover"))


async def with_experts(
    worker: WorkerParts, plan: GatherPlan, mover: EngineThread, network: OpenNetwork | None = None
) -> Gathered:
    """Read what stays in memory, and be ready to fetch the rest.

    Args:
        worker: closes it all at its end.
        plan: what is where.
        mover: from ``open_mover``.
        network: on the mover's event loop, to holders of other experts; none: there are no others.

    Raises:
        CheckpointError: an expert cannot be read.
        InvalidInput: the file cannot be written.
    """
    settings, config, checkpoint = worker.settings, worker.config, worker.checkpoint
    files = ExpertFiles(checkpoint, config, worker.dtype, worker.device, settings.quantization)
    assembling = assemble(
        plan,
        files,
        await on_own_thread(worker.load_gates),
        mover.run,
        model_digest=config.digest,
        directory=Path(settings.offload_dir or cache_directory()),
        network=network.network if network else None,
        timeout_s=settings.expert_timeout_s,
        budget_bytes=settings.expert_memory_bytes,
        streams=CudaStreams(worker.device) if plan.on_device else None,
    )
    return Gathered(await worker.process.enter(assembling), mover)


async def measured(worker: WorkerParts, gathered: Gathered) -> float:
    """Begin to fetch, and measure steps of the largest size; the holders must be known.

    Returns:
        How many times as long the largest step takes for transfers that it does not hide.

    Raises:
        InUse: the largest step does not fit the memory of the device.
    """
    gathered.dispatcher.prime()
    rows = worker.settings.max_num_batched_tokens
    calibrating = calibrate(worker.decoder, gathered.parts, rows)
    with within_memory(worker.device, "--max-num-batched-tokens", f"a step of {rows} rows"):
        found, hiding_rows = await worker.thread.run(calibrating)
    saturation = found.saturation_flops(step_flops(worker.config, rows))
    metrics.SLOWDOWN.set(found.slowdown)
    metrics.SATURATION_FLOPS.set(saturation)
    metrics.HIDING_ROWS.set(hiding_rows)
    report = log.info if hiding_rows <= rows else log.warning
    report(
        "gather.calibrated",
        slowdown=round(found.slowdown, 3),
        saturation_flops=saturation,
        hiding_rows=round(hiding_rows),
        max_num_batched_tokens=rows,
        compute_ms=[round(1e3 * s, 2) for s in found.compute_s],
        transfer_ms=[round(1e3 * s, 2) for s in found.transfer_s],
    )
    return found.slowdown
