"""A suite that cannot fit is refused before anything starts, with the plan and with what would fit."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from moesaic.cli.suite.devices import MACHINE
from moesaic.cli.suite.memory_plan import MIB, ProcessMemory, Settings, SuiteMemory, plan_suite
from moesaic.cli.suite.options import SuiteOptions
from moesaic.cli.terminal.outcome import CommandError, Exit
from moesaic.models.configuration.config import ModelConfig
from moesaic.models.configuration.sizes import LEAST_KV_TOKENS
from moesaic.prefix.blocks import BLOCK_SIZE

if TYPE_CHECKING:
    from moesaic.settings import ServiceSettings

SMALLER = ("int8", "int4")  # quantisations, as far as services have them
GIB = 1 << 30
VARIABLE, EXPERTS_VARIABLE = "MOESAIC_KV_BLOCKS", "MOESAIC_MAX_EXPERT_BYTES"
CHOSEN = {"kv_blocks", "kv_memory_fraction"}  # settings by which a user decides


def check_fits(
    options: SuiteOptions, config: ModelConfig, settings: Settings, plan: SuiteMemory
) -> None:
    """Make sure that there is the memory that a plan needs.

    Raises:
        CommandError: there is not, with the table, and what would fit; or expert workers may not have as much as
            their slots hold, so no placement could ever be made.
    """
    for process in plan.processes:
        limit = (
            getattr(settings[process.name], "max_expert_bytes", 0)
            if process.role == "expert"
            else 0
        )
        if 0 < limit < (held := process.parts["experts"]):
            raise CommandError(
                f"--max-expert-bytes {limit}: the slots of {process.name} hold {held} bytes of experts; give more, or "
                "more --experts",
                Exit.USAGE,
            )
    if plan.fits:
        return
    raise CommandError(
        f"this suite does not fit into memory\n{table(plan)}\n{advice(options, config, settings, plan)}",
        Exit.USAGE,
    )


def advice(
    options: SuiteOptions, config: ModelConfig, settings: Settings, plan: SuiteMemory
) -> str:
    """Write which changes of one flag would fit."""
    others = list(what_fits(options, config, settings, plan.available))
    nothing = ["nothing that one flag changes: it takes more memory, or more machines"]
    return "\n".join(["what would fit:", *(f"  {how}" for how in others or nothing)])


def what_fits(
    options: SuiteOptions, config: ModelConfig, settings: Settings, available: Mapping[str, int]
) -> Iterator[str]:
    """Write a line for each change of one flag with which the suite would fit."""
    for how, changed, made in _changes(options, config, settings):
        try:
            plan = plan_suite(changed, config, made, available)
        except CommandError:
            continue
        if plan.fits:
            needed = max(plan.needed.values())
            yield f"{how}: {needed / GIB:.1f} GiB, KV for {plan.kv_tokens} tokens"


def _changes(
    options: SuiteOptions, config: ModelConfig, settings: Settings
) -> Iterator[tuple[str, SuiteOptions, Settings]]:
    def everywhere(**changes: Any) -> Settings:
        return {
            name: of.model_copy(update={k: v for k, v in changes.items() if hasattr(of, k)})
            for name, of in settings.items()
        }

    computing = next(of for of in settings.values() if hasattr(of, "quantization"))
    known = str(type(computing).model_fields["quantization"].annotation)
    if getattr(computing, "quantization", "") == "none":
        for quantization in SMALLER:
            if repr(quantization) in known:
                changes = {"quantization": quantization, "dtype": "float32"}
                yield f"--quantization {quantization}", options, everywhere(**changes)
        if getattr(computing, "dtype", "") == "float32":
            yield "--dtype bfloat16", options, everywhere(dtype="bfloat16")
    if options.attention > 1:
        fewer = replace(options, attention=1, standby_attention=0)
        yield "--attention 1", fewer, settings
    if options.topology in ("local", "gathered") and not options.offload:
        yield "--offload", replace(options, offload=True), everywhere(offload=True)
    smaller = {"max_num_batched_tokens": 512, "max_num_seqs": 16, "sweep_bytes": 0, "kv_blocks": 0}
    yield (
        "--max-num-batched-tokens 512 --max-num-seqs 16 --sweep-bytes 0",
        options,
        everywhere(**smaller),
    )


def table(plan: SuiteMemory) -> str:
    """Write the plan in MiB: a column for each kind of process, and the sums beside what there is."""
    kinds = list(_kinds(plan))
    parts = sorted(
        (process.parts for process, _ in kinds), key=len, reverse=True
    )  # the fullest order first
    names = list(dict.fromkeys(name for of in parts for name in of))
    grid = [["MiB", *(f"{count} x {process.role}" for process, count in kinds)]]
    for name in names:
        sizes = [process.parts.get(name, 0) for process, _ in kinds]
        if any(sizes):
            grid.append([name, *(f"{size / MIB:,.1f}" if size else "" for size in sizes)])
    grid.append(["each", *(f"{process.total / MIB:,.1f}" for process, _ in kinds)])
    if any(process.place != MACHINE for process, _ in kinds):
        grid.append(["on", *(process.place for process, _ in kinds)])
    widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in grid
    ]
    return "\n".join([*lines, *_notes(plan)])


def facts(plan: SuiteMemory) -> dict[str, Any]:
    """Give the plan for programs; sizes in bytes."""
    return {
        "fits": plan.fits,
        "kv_bytes_per_token": plan.kv_token,
        "kv_tokens": plan.kv_tokens,
        "max_model_len": plan.context,
        "expert_bytes": plan.expert,
        "slots_per_layer": plan.slots,
        "places": [
            {
                "place": place,
                "needed_bytes": needed,
                "room_bytes": plan.room(place),
                "available_bytes": plan.available[place],
            }
            for place, needed in plan.needed.items()
        ],
        "processes": [
            {
                "name": process.name,
                "place": process.place,
                "bytes": process.total,
                "machine_bytes": process.on_host
                or (process.total if process.place == MACHINE else 0),
                "parts": dict(process.parts),
            }
            for process in plan.processes
        ],
    }


def _notes(plan: SuiteMemory) -> Iterator[str]:
    whole = plan.context * plan.kv_token
    if plan.kv_tokens:
        yield (
            f"KV: {plan.kv_token:,} bytes a token, {plan.kv_tokens:,} tokens an attention worker: "
            f"{plan.kv_tokens / plan.context:.1f} contexts of {plan.context:,} tokens, {whole / MIB:,.1f} MiB each"
        )
        if plan.kv_tokens < plan.context:
            yield f"no request can have more than {plan.kv_tokens:,} tokens: KV for a whole context does not fit"
    slots = f", {plan.slots} slots a layer in each process that has them" if plan.slots else ""
    yield f"one routed expert: {plan.expert / MIB:,.2f} MiB{slots}"
    for place, needed in plan.needed.items():
        yield (
            f"{place}: {needed / GIB:.2f} GiB needed; {plan.room(place) / GIB:.2f} GiB may be taken, "
            f"{plan.fraction:.0%} of the {plan.available[place] / GIB:.2f} GiB there are"
        )


def _kinds(plan: SuiteMemory) -> Iterator[tuple[ProcessMemory, int]]:
    """Give processes with the same parts once, with their number."""
    counts: dict[Any, tuple[ProcessMemory, int]] = {}
    for process in plan.processes:
        key = (process.role, process.place, tuple(process.parts.items()))
        first, count = counts.get(key, (process, 0))
        counts[key] = (first, count + 1)
    yield from counts.values()


def experts_environment(plan: SuiteMemory, settings: Settings) -> dict[str, str]:
    """Give the variable that bounds the experts of expert workers, old ones included; nothing if the user has."""
    workers = [process for process in plan.processes if process.role == "expert"]
    if not workers or "max_expert_bytes" in settings[workers[0].name].model_fields_set:
        return {}
    return {EXPERTS_VARIABLE: str(min(plan.expert_limit(worker) for worker in workers))}


def kv_environment(plan: SuiteMemory, settings: "ServiceSettings") -> dict[str, str]:
    """Give the variable that bounds the KV of attention workers; nothing if the user has bounded it."""
    if settings.model_fields_set & CHOSEN or not plan.kv_tokens:
        return {}
    return {VARIABLE: str(max(LEAST_KV_TOKENS, plan.kv_tokens) // BLOCK_SIZE)}
