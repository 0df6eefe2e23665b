"""``moesaic plan``: the memory of a suite, before there is one."""

from typing import Annotated, Any, Literal

import typer

from moesaic.cli.checks.sizes import read_size
from moesaic.cli.checks.topology import check_topology
from moesaic.cli.suite.processes import DEFAULT_AGENTS, DEFAULT_EXPERT_WORKERS
from moesaic.cli.terminal.console import print_json
from moesaic.cli.terminal.options import DevicesOption, JsonOption, MemoryFractionOption
from moesaic.cli.terminal.outcome import Exit


def plan(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Option(
            envvar="MOESAIC_MODEL",
            help="HF-format model directory, or owner/name on the Hugging Face hub; weights are not read.",
        ),
    ],
    topology: Annotated[
        Literal["local", "disaggregated", "gathered", "all-to-all", "edge"],
        typer.Option(
            envvar="MOESAIC_TOPOLOGY",
            metavar="[local|disaggregated|gathered|edge]",
            help="As of 'moesaic up'.",
        ),
    ] = "disaggregated",
    attention: Annotated[
        int | None, typer.Option(envvar="MOESAIC_ATTENTION", min=1, max=64, help="As of up.")
    ] = None,
    experts: Annotated[
        int | None, typer.Option(envvar="MOESAIC_EXPERTS", min=1, max=256, help="As of up.")
    ] = None,
    slots_per_layer: Annotated[
        int | None, typer.Option(envvar="MOESAIC_SLOTS_PER_LAYER", min=1, help="As of up.")
    ] = None,
    offload: Annotated[
        bool, typer.Option("--offload", envvar="MOESAIC_OFFLOAD", help="As of up.")
    ] = False,
    agents: Annotated[
        int | None, typer.Option(envvar="MOESAIC_AGENTS", min=1, max=64, help="As of up.")
    ] = None,
    memory: Annotated[
        str,
        typer.Option(
            help="Memory of the machine, and behind it of its GPUs: one size or several, such as 64G or 256G,80G "
            "(default: what is free here).",
        ),
    ] = "",
    memory_fraction: MemoryFractionOption = 0.9,
    devices: DevicesOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Show the memory that each process of a suite takes, by part, beside the memory there is.

    Every setting of a service is a flag here, too, such as --quantization int8 or --max-model-len 8K.
    Exit status 1 if it does not fit.
    """
    from moesaic.cli.suite.fitting import advice, facts, table
    from moesaic.cli.suite.prepare import planned
    from moesaic.cli.suite.processes import SuiteOptions
    from moesaic.cli.suite.service_settings import service_flags

    of_topology = {
        "--experts": experts,
        "--slots-per-layer": slots_per_layer,
        "--attention": attention,
        "--offload": offload,
        "--agents": agents,
    }
    check_topology(topology, of_topology)
    own = [name for parameter in context.command.params for name in parameter.opts]
    options = SuiteOptions(
        topology=topology,
        model=model,
        attention=attention or 1,
        experts=experts or DEFAULT_EXPERT_WORKERS,
        slots_per_layer=slots_per_layer or 0,
        offload=offload,
        agents=agents or DEFAULT_AGENTS,
        host="127.0.0.1",
        port=0,
        settings=service_flags(context.args, own, topology),
        memory_fraction=memory_fraction,
        devices=devices,
    )
    sizes = [read_size("--memory", size) for size in memory.split(",")] if memory else []
    found = planned(options, sizes)
    if as_json:
        shown: dict[str, Any] = facts(found.memory)
        print_json(shown)
    else:
        print(table(found.memory))
        if not found.memory.fits:
            print(advice(found.options, found.config, found.settings, found.memory))
    if not found.memory.fits:
        raise typer.Exit(Exit.ERROR)
