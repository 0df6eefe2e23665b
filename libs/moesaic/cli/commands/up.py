"""``moesaic up`` and ``moesaic down``: a whole suite on this machine."""

import time
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from moesaic.cli.checks.exposure import check_exposure, checked_keys_file
from moesaic.cli.checks.model_names import given_model
from moesaic.cli.checks.sizes import read_memory
from moesaic.cli.checks.topology import check_topology
from moesaic.cli.clients.rest_key import (
    API_KEY_VARIABLE,
    KEYS_FILE_VARIABLE,
    checked_api_key,
)
from moesaic.cli.machine.links.link import read_link
from moesaic.cli.suite.processes import DEFAULT_AGENTS, DEFAULT_EXPERT_WORKERS
from moesaic.cli.terminal.console import print_json, say
from moesaic.cli.terminal.options import DevicesOption, JsonOption, MemoryFractionOption
from moesaic.loopback import plain_host

if TYPE_CHECKING:
    from moesaic.cli.machine.state import SuiteState

EDGE_PANEL = "Edge topology"
SETTINGS_PANEL = "Settings of the services"


def up(
    context: typer.Context,
    topology: Annotated[
        Literal["local", "disaggregated", "gathered", "all-to-all", "edge"],
        typer.Option(
            envvar="MOESAIC_TOPOLOGY",
            metavar="[local|disaggregated|gathered|edge]",  # all-to-all is there to compare with
            help="Place of the experts: in every attention worker (local); in workers of their own "
            "(disaggregated); divided among the attention workers, which pull each other's layer "
            "by layer (gathered); or divided among agents with little memory each, which ask each "
            "other (edge).",
        ),
    ] = "disaggregated",
    model: Annotated[
        str,
        typer.Option(
            envvar="MOESAIC_MODEL",
            help="HF-format model directory, or a repository of the Hugging Face hub: owner/name or "
            "owner/name@revision (default: the demo model of a clone).",
        ),
    ] = "",
    attention: Annotated[
        int | None,
        typer.Option(
            envvar="MOESAIC_ATTENTION",
            min=1,
            max=64,
            help="Number of attention workers (default: 1).",
        ),
    ] = None,
    experts: Annotated[
        int | None,
        typer.Option(
            envvar="MOESAIC_EXPERTS", min=1, max=256, help="Number of expert workers (default: 2)."
        ),
    ] = None,
    slots_per_layer: Annotated[
        int | None,
        typer.Option(
            envvar="MOESAIC_SLOTS_PER_LAYER",
            min=1,
            help="Expert slots of each expert worker per layer (default: enough).",
        ),
    ] = None,
    standby_attention: Annotated[
        int,
        typer.Option(
            envvar="MOESAIC_STANDBY_ATTENTION",
            min=0,
            max=64,
            help="Further attention workers, loaded but without work until 'moesaic scale' wants them.",
        ),
    ] = 0,
    standby_experts: Annotated[
        int,
        typer.Option(
            envvar="MOESAIC_STANDBY_EXPERTS",
            min=0,
            max=256,
            help="Further expert workers, likewise.",
        ),
    ] = 0,
    offload: Annotated[
        bool,
        typer.Option(
            "--offload",
            envvar="MOESAIC_OFFLOAD",
            help="Keep experts of attention workers in files, and only a few layers of them in "
            "memory; disaggregated: for steps in which that is faster than expert workers.",
        ),
    ] = False,
    agents: Annotated[
        int | None,
        typer.Option(
            envvar="MOESAIC_AGENTS",
            rich_help_panel=EDGE_PANEL,
            min=1,
            max=64,
            help="Number of agents, each an edge server (default: 3).",
        ),
    ] = None,
    memory: Annotated[
        str,
        typer.Option(
            envvar="MOESAIC_MEMORY",
            rich_help_panel=EDGE_PANEL,
            help="Memory of an agent for the model: one size for all, such as 40M, or one for each, "
            "such as 40M,40M,80M (default: enough for all experts).",
        ),
    ] = "",
    link: Annotated[
        str,
        typer.Option(
            envvar="MOESAIC_LINK",
            rich_help_panel=EDGE_PANEL,
            help="Rate, or rate and delay, of the links between agents, such as 500mbit,2ms; needs "
            "root. A frame has the delay once on its way (default: no limits).",
        ),
    ] = "",
    memory_fraction: MemoryFractionOption = 0.9,
    devices: DevicesOption = "auto",
    host: Annotated[
        str, typer.Option(envvar="MOESAIC_HOST", help="Address the gateway listens on.")
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(
            envvar="MOESAIC_PORT",
            min=0,
            max=65535,
            help="Port of the gateway; 0 takes a free one.",
        ),
    ] = 8000,
    api_key: Annotated[
        str,
        typer.Option(
            envvar=API_KEY_VARIABLE,
            help="Key that callers must send; better given by the variable, hidden from other users.",
        ),
    ] = "",
    api_keys_file: Annotated[
        str,
        typer.Option(
            envvar=KEYS_FILE_VARIABLE,
            help="File of tenants with their keys and limits, made by 'moesaic api-key new'.",
        ),
    ] = "",
    no_auth: Annotated[
        bool,
        typer.Option(
            "--no-auth",
            envvar="MOESAIC_NO_AUTH",
            help="Let the gateway listen beyond this machine without a key.",
        ),
    ] = False,
    served_model_name: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=SETTINGS_PANEL,
            help="Name of the model in the API (default: the directory's, or owner/name).",
        ),
    ] = None,
    quantization: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=SETTINGS_PANEL,
            help="Rounding of weights on a CPU: int8, int4 or int4-128 (default: none).",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=SETTINGS_PANEL,
            help="Type of weights in memory: float32, bfloat16 or float16 (default: the checkpoint's).",
        ),
    ] = None,
    log_level: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=SETTINGS_PANEL,
            help="Least severe level to log: debug, info, warning or error (default: info).",
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=1, help="Longest time for the start, in seconds.")
    ] = 600,
    detach: Annotated[
        bool, typer.Option("--detach", help="Run in the background; return when ready.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Start a suite of services and keep it running until Ctrl-C.

    Every setting of a service is a flag here, too, such as --max-num-seqs 128, for all services that
    have it: 'moesaic serve ROLE --help' lists them.
    """
    from moesaic.cli.suite.processes import SuiteOptions
    from moesaic.cli.suite.ready import ready_facts, ready_text
    from moesaic.cli.suite.service_settings import service_flags

    named = {
        "--served-model-name": served_model_name,
        "--quantization": quantization,
        "--dtype": dtype,
        "--log-level": log_level,
    }
    given = [f"{flag}={value}" for flag, value in named.items() if value is not None]
    own = [name for parameter in context.command.params for name in parameter.opts]
    of_topology = {
        "--experts": experts,
        "--slots-per-layer": slots_per_layer,
        "--attention": attention,
        "--standby-attention": standby_attention,
        "--standby-experts": standby_experts,
        "--offload": offload,
        "--agents": agents,
        "--memory": memory,
        "--link": link,
    }
    check_topology(topology, of_topology)
    settings = service_flags([*given, *context.args], own, topology)
    agents = agents or DEFAULT_AGENTS
    wants_key = bool(checked_api_key(api_key) or api_keys_file)
    host = plain_host(host)
    check_exposure(host, wants_key, no_auth)
    options = SuiteOptions(
        topology=topology,
        model=given_model(model),
        attention=attention or 1,
        experts=experts or DEFAULT_EXPERT_WORKERS,
        slots_per_layer=slots_per_layer or 0,
        standby_attention=standby_attention,
        standby_experts=standby_experts,
        offload=offload,
        agents=agents,
        memory_bytes=read_memory(memory, agents),
        link=read_link(link) if link else None,
        host=host,
        port=port,
        api_key=api_key,
        api_keys_file=checked_keys_file(api_keys_file),
        no_auth=no_auth,
        settings=settings,
        memory_fraction=memory_fraction,
        devices=devices,
    )
    started = time.monotonic()

    def on_ready(state: "SuiteState") -> None:
        if as_json:
            print_json(ready_facts(state))
        else:
            took_s = time.monotonic() - started
            print(ready_text(state, took_s, detached=detach, wants_key=wants_key), flush=True)

    if detach:
        from moesaic.cli.suite.background import foreground_flags, start_in_background
        from moesaic.cli.suite.prepare import prepared

        options = prepared(options).options  # a download shows its progress here
        flags = foreground_flags(options, timeout)
        on_ready(start_in_background(flags, {API_KEY_VARIABLE: api_key}))
    else:
        from moesaic.cli.suite.launch import run_suite

        run_suite(options, timeout, on_ready)
        say("stopped")


def down(
    timeout: Annotated[
        float, typer.Option(min=0, help="Longest time for running requests to finish, in seconds.")
    ] = 60,
) -> None:
    """Stop the suite that was started in this directory."""
    from moesaic.cli.suite.background import stop_suite

    print(stop_suite(timeout))
