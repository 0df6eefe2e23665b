"""``moesaic plan``: the memory of a suite, before there is one."""

from typing import Annotated, Any

import typer

from moesaic.cli.suite.config import ConfigOption, ModelArgument
from moesaic.cli.suite.options import SuiteOptions
from moesaic.cli.terminal.console import print_json
from moesaic.cli.terminal.options import JsonOption, takes
from moesaic.cli.terminal.outcome import Exit

_TAKEN = (
    *("topology", "model", "attention", "experts", "slots_per_layer", "offload", "agents"),
    *("memory_fraction", "devices"),
)


@takes(SuiteOptions, *_TAKEN)
def plan(
    context: typer.Context,
    values: dict[str, Any],
    named: ModelArgument = "",
    config: ConfigOption = None,
    memory: Annotated[
        str,
        typer.Option(
            help="Memory of the machine, then of its GPUs, such as 64G or 256G,80G (default: the "
            "free memory of this machine).",
        ),
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Show the memory that each process of a suite needs, by part, and the available memory; weights are not read.

    All settings of services are also flags here, such as --quantization int8 or --max-model-len 8K.
    Exit status 1 if the suite does not fit.
    """
    from dataclasses import replace

    from moesaic.cli.checks.model_names import given_model
    from moesaic.cli.checks.sizes import read_size
    from moesaic.cli.suite.fitting import advice, facts, table
    from moesaic.cli.suite.prepare import planned
    from moesaic.cli.suite.service_settings import asked_options

    options = asked_options(context, {**values, "port": 0}, named)
    options = replace(options, model=given_model(options.model))
    sizes = [read_size("--memory", size) for size in memory.split(",")] if memory else []
    found = planned(options, sizes)
    if as_json:
        print_json(facts(found.memory))
    else:
        print(table(found.memory))
        if not found.memory.fits:
            print(advice(found.options, found.config, found.settings, found.memory))
    if not found.memory.fits:
        raise typer.Exit(Exit.ERROR)
