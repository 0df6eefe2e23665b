"""The parts of one site: its experts, links to other sites, and the memory of both."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass, replace

import structlog

from moesaic.cluster.background import background
from moesaic.dispatch.collaborative.dispatcher import (
    AT_ONCE,
    CollaborativeDispatcher,
    SiteParts,
)
from moesaic.dispatch.collaborative.file_cache import FileCache
from moesaic.dispatch.collaborative.peers import Peers
from moesaic.engine.thread import EngineThread, engine_thread
from moesaic.errors import InvalidInput, UnusableSettings
from moesaic.experts.activations import ActivationMeter
from moesaic.experts.host import ExpertHost
from moesaic.experts.loaded import layout_of
from moesaic.experts.pace import LoadPace
from moesaic.models.configuration.config import ModelConfig
from moesaic.models.configuration.sizes import kv_bytes, numbers_for, row_numbers
from moesaic.models.weights.served import held_dtype
from moesaic.native.own_thread import on_own_thread
from moesaic.prefix.blocks import BLOCK_SIZE
from moesaic.services.attention.kv_room import USUAL_BLOCKS
from moesaic.services.attention.modes.contract import Mode, WorkerParts
from moesaic.services.edge_agent.memory import MemoryNeeds, MemoryPlan, RequestedSizes, plan_memory
from moesaic.services.edge_agent.settings import EdgeAgentSettings
from moesaic.telemetry.memory import own_bytes
from moesaic.transport.frame import FrameLimits
from moesaic.transport.ucx.opening import OpenNetwork, open_network

log = structlog.get_logger()

# Memory is short here, and a step that asks for an earlier epoch later than this finds its experts elsewhere.
RETIRE_AFTER_S = 3.0
EXPERT_THREADS = 3  # the engine, what computes beside it, and what answers other sites


@dataclass
class Site:
    """A site that is open.

    Attributes:
        needs: that its memory is planned from.
        plan: of its memory.
        host: the experts here.
        files: experts on this machine's disk; None: they are not read while serving.
        peers: the other sites.
        dispatcher: computes the experts of this site's steps.
        mode: for the engine.
        meter: counts the choices of this site's requests.
        thread: of the engine.
        answering: answers other sites.
        allowed_bytes: for experts in slots, as the scheduler is told; 0: no limit.
    """

    needs: MemoryNeeds
    plan: MemoryPlan
    host: ExpertHost
    files: FileCache | None
    peers: Peers
    dispatcher: CollaborativeDispatcher
    mode: Mode
    meter: ActivationMeter
    thread: EngineThread
    answering: OpenNetwork
    allowed_bytes: int = 0

    @property
    def most_expert_bytes(self) -> int:
        """Memory for experts in slots, including those that a placement brings in; 0: no limit."""
        if not self.plan.limit_bytes:
            return 0
        planned = (self.plan.num_slots + self.plan.num_staged) * self.needs.expert
        return max(planned, self.host.epochs.resident_bytes)

    @property
    def is_settled(self) -> bool:
        """True if the experts here fit the slots of the plan, and none are being loaded or dropped."""
        return self.host.epochs.resident_bytes <= self.plan.num_slots * self.needs.expert

    def change_limit(self, limit_bytes: int) -> None:
        """Divide another limit. KV and buffers keep their memory; experts leave with the next placement.

        Raises:
            InvalidInput: it leaves no room for experts.
        """
        blocks, rows = self.plan.kv_blocks, self.plan.max_rows
        requested = RequestedSizes(blocks, rows, blocks, rows)
        self.adopt(plan_memory(limit_bytes, self.needs, requested))

    def follow_experts(self) -> bool:
        """Lower the limit to the memory there is, if that is less than planned; return true if it changed.

        Experts leave after a limit was lowered, and some may still have been loaded meanwhile.
        """
        changed = self.most_expert_bytes != self.allowed_bytes
        if changed:
            self.allowed_bytes = self.most_expert_bytes
            self.host.loader.max_expert_bytes = self.allowed_bytes
        return changed

    def adopt(self, plan: MemoryPlan) -> None:
        """Take no more for experts than a plan says."""
        self.plan = plan
        self.allowed_bytes = self.most_expert_bytes
        self.host.loader.max_expert_bytes = self.allowed_bytes
        if self.files is not None:
            self.thread.call(self.files.resize, plan.num_cached)
        log.info("memory.planned", **plan.__dict__)

    async def left(self) -> None:
        """Wait for a short time until other sites have no links to this one any more."""
        with suppress(TimeoutError):
            async with asyncio.timeout(RETIRE_AFTER_S):
                await self.answering.run(self.answering.network.all_left())


def limited(
    site: Site, worker: WorkerParts, settings: EdgeAgentSettings, before_bytes: int
) -> WorkerParts:
    """Plan the memory of a site that has all but KV, buffers and experts.

    Args:
        site: gets its plan.
        worker: gets the settings that follow from the plan.
        settings: settings as they were given.
        before_bytes: memory of the process before it loaded anything.

    Returns:
        The worker.

    Raises:
        UnusableSettings: the limit is too low.
    """
    held = max(0, own_bytes() - before_bytes)
    site.needs = replace(site.needs, held=held)
    requested = RequestedSizes(settings.kv_blocks, settings.max_num_batched_tokens, USUAL_BLOCKS)
    try:
        site.adopt(plan_memory(settings.memory_bytes, site.needs, requested))
    except InvalidInput as error:
        raise UnusableSettings(error.field, error.fix) from error
    log.info("memory.held", held_bytes=held, expert_bytes=site.needs.expert)
    plan = site.plan
    if not plan.limit_bytes:
        return worker
    changed = {
        "kv_blocks": plan.kv_blocks,
        "max_num_batched_tokens": plan.max_rows,
        "max_num_seqs": min(settings.max_num_seqs, plan.kv_blocks),
        "sweep_bytes": 0,
    }
    process = replace(worker.process, settings=worker.settings.model_copy(update=changed))
    return replace(worker, process=process)


async def open_site(worker: WorkerParts, settings: EdgeAgentSettings) -> Site:
    """Open all parts, until the worker ends; ``limited`` says what they may take."""
    config, thread, needs = worker.config, worker.thread, _needs(worker.config, settings)
    plan = MemoryPlan(0, 0, 0, needs.num_experts, needs.num_experts, 0)
    host = await on_own_thread(
        ExpertHost,
        worker.checkpoint,
        config,
        settings.worker_id,
        config.moe.num_experts,
        worker.dtype,
        worker.device,
        settings.quantization,
        0,
        RETIRE_AFTER_S,
    )
    answering, address = await _answer(worker, host)
    limits = FrameLimits.of_hidden_size(config.hidden_size)
    network = await worker.open_network(limits, thread)
    peers = await thread.build(Peers, network.network, settings.expert_timeout_s)
    files = await thread.build(_open_files, host, config, plan) if settings.read_files else None
    meter = ActivationMeter(config.moe.num_experts)
    gates = await on_own_thread(worker.load_gates)
    parts = SiteParts(
        host.epochs, gates, peers, files, host.files.experts.layer_substitution, meter
    )
    dispatcher = await thread.build(
        CollaborativeDispatcher,
        parts,
        config,
        worker.decoder.dtype,
        wire=settings.wire_dtype,
        deterministic=settings.deterministic,
    )
    worker.process.parts.push_async_callback(lambda: thread.run(dispatcher.close()))
    await worker.process.enter(background(thread.run(peers.probe()), "probes"))
    mode = Mode(dispatcher, address)
    return Site(needs, plan, host, files, peers, dispatcher, mode, meter, thread, answering)


async def _answer(worker: WorkerParts, host: ExpertHost) -> tuple[OpenNetwork, str]:
    """Answer other sites on a thread of their own.

    Returns:
        Their network, and the address.
    """
    answering = await worker.process.enter(engine_thread(worker.device, "answering"))
    limits = FrameLimits.of_hidden_size(worker.config.hidden_size)
    digest = worker.config.digest
    opening = open_network(worker.settings, "edge-agent", digest, limits, answering.run)
    network = await worker.process.enter(opening)
    return network, await network.listen(worker.settings.data_port, host.answers.answer)


def _open_files(host: ExpertHost, config: ModelConfig, plan: MemoryPlan) -> FileCache:
    return FileCache(
        host.files.bring(LoadPace()),
        config.moe_layers,
        config.moe.num_experts,
        plan.num_cached,
    )


def _needs(config: ModelConfig, settings: EdgeAgentSettings) -> MemoryNeeds:
    top_k, hidden = config.moe.top_k, config.hidden_size
    # Each thread that computes experts keeps room for the halves of those that its rows choose.
    kept = EXPERT_THREADS * 3 * (top_k * config.moe.expert_size + hidden)
    # Once the layers are done a row may have its logits, and a copy of them where tokens are compared.
    logits = 2 * config.vocab_size
    return MemoryNeeds(
        held=0,
        expert=_expert_bytes(config, settings),
        block=BLOCK_SIZE * kv_bytes(config, numbers_for(settings, config)),
        row=4 * (kept + max(row_numbers(config), logits)),
        num_experts=len(config.moe_layers) * config.moe.num_experts,
        at_once=AT_ONCE,
    )


def _expert_bytes(config: ModelConfig, settings: EdgeAgentSettings) -> int:
    dtype = held_dtype(settings, config)
    on_gpu = settings.device != "cpu"
    return layout_of(config, dtype, settings.quantization, as_stored=on_gpu).nbytes
