# The memory of a suite, process by process, before any of it starts. Imports no torch but for gathered experts.
#   Weights, KV, steps   by moesaic.models.configuration.sizes.
#   Process              what a process takes besides, measured by benchmarks/memory: interpreter, libraries, and
#                        for the gateway its tokenizer.
#   KV                   eight whole contexts an attention worker, or what --memory-fraction of the memory leaves.
"""The plan of a suite's memory: each process by part, beside the memory that there is."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from moesaic.cli.suite.devices import MACHINE, places_of
from moesaic.cli.suite.options import SuiteOptions
from moesaic.cli.suite.processes import name_of, numbers_of, slots_per_layer
from moesaic.cli.terminal.outcome import CommandError, Exit
from moesaic.errors import UnusableSettings
from moesaic.models.configuration.captured import captured_bytes_of
from moesaic.models.configuration.config import ModelConfig
from moesaic.models.configuration.division import Division, divide, part_of
from moesaic.models.configuration.sizes import (
    LEAST_KV_TOKENS,
    MOVING,
    ON_GPU_BYTES,
    Numbers,
    WeightBytes,
    batch_bytes,
    kv_bytes,
    numbers_for,
    step_bytes,
    usual_kv_tokens,
    weight_bytes,
)
from moesaic.prefix.blocks import BLOCK_SIZE

if TYPE_CHECKING:
    from moesaic.dispatch.gathered.plan import GatherPlan
    from moesaic.settings import ModelSettings, ServiceSettings

Settings = Mapping[str, Any]  # ServiceSettings, by the name of a service
MIB = 1 << 20
PROCESS_BYTES = {
    "attention": 212 * MIB,
    "edge-agent": 237 * MIB,
    "expert": 208 * MIB,
    "scheduler": 56 * MIB,
    "gateway": 72 * MIB,
    "redis": 8 * MIB,
}
LIBRARY_BYTES = 36 * MIB  # pages of torch's files, which its processes on a machine share
TOKEN_BYTES = 270  # of the vocabulary, in a gateway's tokenizer
KV, MOVES = "kv", "moves"


@dataclass(frozen=True)
class ProcessMemory:
    """The memory of one process.

    Attributes:
        name: of the process.
        role: of its service.
        place: the machine, or a device such as ``cuda:0``.
        parts: bytes by part.
        on_host: of the machine's memory besides, for a process whose place is a device.
        kv_token: bytes of a token's KV here; 0: it has none.
    """

    name: str
    role: str
    place: str
    parts: Mapping[str, int]
    on_host: int = 0
    kv_token: int = 0

    @property
    def total(self) -> int:
        """Bytes of its place."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class SuiteMemory:
    """The memory of all processes of a suite.

    Attributes:
        processes: of the suite.
        available: bytes by place.
        fraction: of these that the suite may take.
        kv_token: bytes of a token's KV, in an attention worker.
        kv_tokens: for which each attention worker has KV.
        context: tokens of the longest request.
        expert: bytes of a routed expert.
        slots: experts a layer in each process that holds some; 0: none, or it is the agent's own matter.
    """

    processes: tuple[ProcessMemory, ...]
    available: Mapping[str, int]
    fraction: float
    kv_token: int
    kv_tokens: int
    context: int
    expert: int
    slots: int

    @property
    def needed(self) -> dict[str, int]:
        """Bytes by place."""
        sums = dict.fromkeys(self.available, 0)
        for process in self.processes:
            sums[process.place] += process.total
            sums[MACHINE] += process.on_host
        return sums

    def room(self, place: str) -> int:
        """Count the bytes of a place that the suite may take."""
        return int(self.fraction * self.available[place])

    def expert_limit(self, process: ProcessMemory) -> int:
        """Count the bytes that an expert worker may have for experts, those held twice while they move included."""
        alike = sum(p.role == process.role and p.place == process.place for p in self.processes)
        spare = max(0, self.room(process.place) - self.needed[process.place]) // alike
        return process.parts["experts"] + process.parts[MOVES] + spare

    @property
    def fits(self) -> bool:
        """True if no place is asked for more than the suite may take of it."""
        return all(needed <= self.room(place) for place, needed in self.needed.items())


def plan_suite(
    options: SuiteOptions,
    config: ModelConfig,
    settings: "Settings",
    available: Mapping[str, int],
) -> SuiteMemory:
    """Plan a suite's memory.

    Args:
        options: of the suite.
        config: of the model, with its context cut as the suite wants it.
        settings: of each service, by its name.
        available: bytes by place, of all places that settings name and of the machine.

    Returns:
        The plan, with as much KV as the rest leaves; with the least KV, it need not fit.

    Raises:
        CommandError: there are fewer slots than experts, or the model cannot be divided among ranks.
    """
    names = [name_of(role, n) for role, count in numbers_of(options).items() for n in range(count)]
    roles = [role for role, count in numbers_of(options).items() for _ in range(count)]
    processes: list[ProcessMemory] = []
    slots = slots_of(options, config.moe.num_experts)
    libraries = LIBRARY_BYTES // sum(getattr(settings[n], "tensor_parallel", 1) for n in names)
    first_attention = next(n for n, role in zip(names, roles, strict=True) if role != "expert")
    for name, role in zip(names, roles, strict=True):
        processes += _ranks(options, role, name, config, settings[name], slots, libraries)
    for name, more in (
        ("gateway", TOKEN_BYTES * config.vocab_size),
        ("scheduler", 0),
        ("redis", 0),
    ):
        own = PROCESS_BYTES[name] + more
        processes.append(ProcessMemory(name, name, MACHINE, {"process": own}))
    numbers = numbers_for(settings[first_attention], config)
    plan = SuiteMemory(
        processes=tuple(processes),
        available=available,
        fraction=options.memory_fraction,
        kv_token=kv_bytes(config, numbers),
        kv_tokens=0,
        context=config.max_positions,
        expert=weight_bytes(config, numbers).expert,
        slots=slots,
    )
    return _with_kv(plan, settings[first_attention])


def slots_of(options: SuiteOptions, num_experts: int) -> int:
    """Count the experts of a layer in each process that holds them; 0: other rules say."""
    if options.topology == "disaggregated":
        return slots_per_layer(options, num_experts)
    return 0 if options.topology in ("edge", "gathered") or options.offload else num_experts


def _ranks(
    options: SuiteOptions,
    role: str,
    name: str,
    config: ModelConfig,
    settings: "ModelSettings",
    slots: int,
    libraries: int,
) -> list[ProcessMemory]:
    """Plan a worker: one process on the machine, or one for each of its GPUs."""
    places, numbers = places_of(settings), numbers_for(settings, config)
    ranks = getattr(settings, "tensor_parallel", 1)
    own = PROCESS_BYTES[role] + libraries
    parts = _parts(options, role, name, config, settings, numbers, slots)
    token = kv_bytes(config, numbers) if KV in parts else 0
    if places == (MACHINE,):
        parts |= {"process": own * ranks}
        return [ProcessMemory(name, role, MACHINE, parts, kv_token=token)]
    found = []
    for rank, place in enumerate(places):
        if ranks > 1:
            division = _divided(config, rank, ranks)
            rank_config = part_of(config, division)
            parts = _of_rank(parts, weight_bytes(rank_config, numbers), division)
            parts["graphs"] = captured_bytes_of(settings, rank_config, numbers)
            token = kv_bytes(rank_config, numbers)
        parts = {**parts, "process": ON_GPU_BYTES}
        rank_name = f"{name}.{rank}" if rank else name
        # The first rank has the routed experts.
        on_host = own if rank else own + _experts_on_host(options, name, config, settings, numbers)
        found.append(ProcessMemory(rank_name, role, place, parts, on_host=on_host, kv_token=token))
    return found


def _divided(config: ModelConfig, rank: int, ranks: int) -> Division:
    try:
        return divide(config, rank, ranks)
    except UnusableSettings as error:
        raise CommandError(f"--tensor-parallel {ranks}: {error.fix}", Exit.USAGE) from error


def _of_rank(whole: Mapping[str, int], own: WeightBytes, division: Division) -> dict[str, int]:
    """Leave what one rank has of a worker: the first alone has embedding, gates and routed experts."""
    divided = {"attention": own.attention, "dense": own.dense, "shared experts": own.shared}
    if division.rank:
        divided |= {"embedding": 0, "gates": 0, "experts": 0}
    # A tied head has no part of its own to divide.
    return {**whole, **divided, "head": own.head // division.ranks}


def _parts(
    options: SuiteOptions,
    role: str,
    name: str,
    config: ModelConfig,
    settings: "ServiceSettings",
    numbers: Numbers,
    slots: int,
) -> dict[str, int]:
    weights = weight_bytes(config, numbers)
    if role == "expert":
        work = batch_bytes(config, numbers)
        slots = getattr(settings, "slots_per_layer", 0) or slots
        experts = slots * len(config.moe_layers) * weights.expert
        moves = -(-slots * len(config.moe_layers) // MOVING) * weights.expert
        return {"experts": experts, MOVES: moves if options.experts > 1 else 0, "steps": work}
    parts = {
        "embedding": weights.embedding,
        "attention": weights.attention,
        "dense": weights.dense,
        "shared experts": weights.shared,
        "gates": weights.gates,
        "experts": _own_experts(options, name, config, settings, weights),
        "head": weights.head,
        "steps": step_bytes(config, numbers, *_step_of(settings)),
        "graphs": captured_bytes_of(settings, config, numbers),
        "scoring": _sweep_bytes(config, settings, numbers),
        KV: 0,
    }
    # All of it is within the agent's limit.
    if options.memory_bytes and role == "edge-agent":
        return {"limit": options.memory_bytes[int(name.rpartition("-")[2])]}
    return parts


def _own_experts(
    options: SuiteOptions,
    name: str,
    config: ModelConfig,
    settings: "ServiceSettings",
    weights: WeightBytes,
) -> int:
    """Count the bytes of routed experts in an attention worker or an agent."""
    if options.topology == "disaggregated":
        return 0
    layers, num_experts = config.moe_layers, config.moe.num_experts
    if options.topology == "all-to-all":
        return len(layers) * -(-num_experts // options.attention) * weights.expert
    if options.topology != "gathered" and not options.offload:
        return len(layers) * num_experts * weights.expert
    return _gathered(options, name, config, settings, weights).total_bytes


def _experts_on_host(
    options: SuiteOptions,
    name: str,
    config: ModelConfig,
    settings: "ServiceSettings",
    numbers: Numbers,
) -> int:
    """Count the bytes of the machine for routed experts that a GPU computes as they come."""
    if options.topology != "gathered" and not options.offload:
        return 0
    return _gathered(options, name, config, settings, weight_bytes(config, numbers)).host_bytes


def _gathered(
    options: SuiteOptions,
    name: str,
    config: ModelConfig,
    settings: "ServiceSettings",
    weights: WeightBytes,
) -> "GatherPlan":
    """Plan the experts that come to an attention worker layer by layer."""
    from moesaic.dispatch.gathered.plan import plan_gather
    from moesaic.experts.pull.ranges import Share

    count = options.attention if options.topology == "gathered" else 1
    return plan_gather(
        config.moe_layers,
        config.moe.num_experts,
        weights.expert,
        share=Share(int(name.rpartition("-")[2]) if count > 1 else 0, count),
        offload=options.offload,
        on_device=MACHINE not in places_of(settings),
    )


def _step_of(settings: "ServiceSettings") -> tuple[int, int]:
    """Give the rows of the largest step, and the sequences that get logits in it."""
    rows: int = getattr(settings, "max_num_batched_tokens", 2048)
    return rows, min(rows, getattr(settings, "max_num_seqs", 64))


def _sweep_bytes(config: ModelConfig, settings: "ServiceSettings", numbers: Numbers) -> int:
    """Count the bytes for scoring without stored KV, no more than two whole prompts of the model need."""
    token = (config.hidden_size + config.kv_width) * numbers.item_bytes
    return min(getattr(settings, "sweep_bytes", 0), 2 * config.max_positions * token)


def _with_kv(plan: SuiteMemory, settings: Any) -> SuiteMemory:
    """Give each attention worker KV: as its settings say, else as places allow."""
    holding: dict[str, int] = {}  # by place, bytes of a token in all workers there
    for process in plan.processes:
        if process.kv_token:
            holding[process.place] = holding.get(process.place, 0) + process.kv_token
    if not holding:
        return plan
    if settings.kv_blocks:
        tokens = settings.kv_blocks * BLOCK_SIZE
    else:
        needed = plan.needed
        fitting = [(plan.room(place) - needed[place]) // size for place, size in holding.items()]
        tokens = min(*fitting, usual_kv_tokens(plan.context))
    tokens = max(tokens, min(LEAST_KV_TOKENS, plan.context)) // BLOCK_SIZE * BLOCK_SIZE
    processes = tuple(
        replace(process, parts={**process.parts, KV: tokens * process.kv_token})
        if process.kv_token
        else process
        for process in plan.processes
    )
    return replace(plan, processes=processes, kv_tokens=tokens)
