"""Experts that are fetched layer by layer: the parts of that, and the peers that they come from."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import structlog
import torch

from moesaic.cluster.background import background
from moesaic.cluster.bus import Bus
from moesaic.cluster.placement_view import watch_placement
from moesaic.dispatch.gathered import metrics
from moesaic.dispatch.gathered.dispatcher import StreamedDispatcher
from moesaic.dispatch.gathered.holder import PULL_LIMITS
from moesaic.dispatch.gathered.holders import PlacedHolders, ShareHolders
from moesaic.dispatch.gathered.measure import calibrate
from moesaic.dispatch.gathered.plan import Share, StreamPlan, plan_stream
from moesaic.dispatch.gathered.shard import PackedExperts
from moesaic.dispatch.gathered.streaming import Streaming, streaming
from moesaic.engine.thread import EngineThread, engine_thread
from moesaic.kernels.expert_layout import ExpertLayout
from moesaic.kernels.native.compile import cache_directory
from moesaic.kernels.own_thread import on_own_thread
from moesaic.models.checkpoint import Checkpoint
from moesaic.models.config import ModelConfig
from moesaic.models.decoder import Decoder
from moesaic.models.flops import step_flops
from moesaic.models.gate import load_gates
from moesaic.transport.ucx import UcxNetwork
from services.attention.peers import follow_peers, follow_placement, sharing_peers
from services.attention.settings import AttentionSettings

log = structlog.get_logger()


@dataclass(frozen=True)
class Streamed:
    """What an attention worker has of ``gathered`` and ``offload``."""

    settings: AttentionSettings
    config: ModelConfig
    parts: AsyncExitStack  # of the worker
    streaming: Streaming
    mover_thread: EngineThread
    data_address: str  # where peers pull from; empty: nobody does

    @property
    def dispatcher(self) -> StreamedDispatcher:
        """What the engine uses."""
        return self.streaming.dispatcher

    @property
    def share(self) -> str:
        """What peers may pull; empty: nothing."""
        return str(self.streaming.plan.share) if self.data_address else ""

    async def start(
        self, bus: Bus, engine: EngineThread, decoder: Decoder, waiting_for: list[str]
    ) -> float:
        """Find the peers, begin to fetch, and measure; the lease must be held, for peers wait too.

        Returns:
            How many times as long the largest step takes for transfers that it does not hide.
        """
        holders, thread = self.streaming.holders, self.mover_thread
        if isinstance(holders, PlacedHolders):
            view = await self.parts.enter_async_context(watch_placement(bus))
            follow = follow_placement(view, thread, holders, self.config.digest)
            await self.parts.enter_async_context(background(follow, "placements"))
        elif holders is not None:
            find = sharing_peers(self.settings, self.config.digest)
            await follow_peers(bus, find, self.parts, thread, holders.set_peers)
        if holders is not None:
            await self._await_peers(holders, waiting_for)
        self.dispatcher.prime()
        rows = self.settings.max_num_batched_tokens
        found, hiding_rows = await engine.run(calibrate(decoder, self.streaming, rows))
        saturation = found.saturation_flops(step_flops(self.config, rows))
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

    async def _await_peers(
        self, holders: ShareHolders | PlacedHolders, waiting_for: list[str]
    ) -> None:
        others = f"attention workers with the other shares of {self.share}"
        waiting_for.append("expert workers" if self.streaming.plan.pool else others)
        try:
            async with asyncio.timeout(self.settings.recovery_s):
                await self.mover_thread.run(holders.complete())
        except TimeoutError:
            log.warning("peers.missing", shares=[str(share) for share in holders.missing])
        finally:
            waiting_for.pop()


async def open_streamed(
    settings: AttentionSettings,
    config: ModelConfig,
    plan: StreamPlan,
    checkpoint: Checkpoint,
    parts: AsyncExitStack,
) -> Streamed:
    """Read what stays in memory, and listen to peers.

    Raises:
        CheckpointError: an expert cannot be read.
        InvalidInput: its file cannot be written.
    """
    thread = await parts.enter_async_context(engine_thread(torch.device("cpu"), "mover"))
    network = None
    if plan.share.count > 1 or plan.pool:
        network = await thread.run(_open_network(settings))
        parts.push_async_callback(lambda: thread.run(network.close()))
    layout = _layout(settings, config)
    gates = await on_own_thread(load_gates, checkpoint, config, layout.dtype, torch.device("cpu"))
    parts_of_it = await parts.enter_async_context(
        streaming(
            plan,
            PackedExperts(checkpoint, config, layout),
            gates,
            thread.run,
            model_digest=config.digest,
            directory=Path(settings.offload_dir or cache_directory()),
            network=network,
            timeout_s=settings.expert_timeout_s,
        )
    )
    address = ""
    if network is not None and plan.share.count > 1:
        where = settings.data
        bound = await thread.run(
            network.listen(where.host, settings.data_port, parts_of_it.holder.answer)
        )
        address = where.advertised(bound)
    return Streamed(settings, config, parts, parts_of_it, thread, address)


def plan_experts(settings: AttentionSettings, config: ModelConfig) -> StreamPlan:
    """What fetching experts takes, before anything is taken. Packs one expert to learn its size: on
    a thread of its own, please.

    Raises:
        InvalidInput: it takes more memory than was given.
    """
    plan = plan_stream(
        config.moe_layers,
        config.moe.num_experts,
        _layout(settings, config).nbytes,
        share=Share.parse(settings.share if settings.dispatch == "gathered" else "0/1"),
        offload=settings.offload,
        window=settings.gather_window,
        budget_bytes=settings.expert_memory_bytes,
        pool=settings.dispatch == "routed",
    )
    log.info(
        "gather.planned",
        total_bytes=plan.total_bytes,
        resident_instead_bytes=plan.resident_bytes,
        first_layer_bytes=plan.layer_bytes,
        share_bytes=plan.shard_bytes,
        ring_bytes=plan.ring_bytes,
        message_bytes=plan.message_bytes,
        file_bytes=plan.file_bytes,
    )
    return plan


def _layout(settings: AttentionSettings, config: ModelConfig) -> ExpertLayout:
    dtype = getattr(torch, settings.dtype)
    return ExpertLayout(config.hidden_size, config.moe.expert_size, dtype, settings.quantization)


async def _open_network(settings: AttentionSettings) -> UcxNetwork:
    return UcxNetwork(
        settings.worker_id,
        "attention",
        settings.secret.get_secret_value().encode(),
        PULL_LIMITS,
        transports=settings.transports,
        own_address=settings.data.host,
    )
