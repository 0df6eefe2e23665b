"""``moesaic up`` and ``moesaic down``: a whole suite on this machine."""

import json
import time
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from moesaic.cli.console import print_json, say
from moesaic.cli.options import JsonOption
from moesaic.cli.outcome import CommandError, Exit

if TYPE_CHECKING:
    from moesaic.cli.state import SuiteState
    from moesaic.cli.suite import SuiteOptions

DEFAULT_EXPERT_WORKERS = 2


def up(
    topology: Annotated[
        Literal["local", "disaggregated"],
        typer.Option(help="Experts in the attention workers, or in workers of their own."),
    ] = "disaggregated",
    model: Annotated[str, typer.Option(help="HF-format model directory.")] = "models/demo",
    attention: Annotated[int, typer.Option(min=1, max=64, help="Attention workers.")] = 1,
    experts: Annotated[
        int | None, typer.Option(min=1, max=256, help="Expert workers (default: 2).")
    ] = None,
    slots_per_layer: Annotated[
        int | None,
        typer.Option(min=1, help="Expert slots of each expert worker per layer (default: enough)."),
    ] = None,
    host: Annotated[
        str, typer.Option(envvar="MOESAIC_HOST", help="Address the gateway listens on.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of the gateway; 0 takes a free one.")
    ] = 8000,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds the start may take.")] = 600,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return when ready, and run in the background.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Start a suite of services and keep it running until Ctrl-C."""
    from moesaic.cli.ports import free_ports
    from moesaic.cli.suite import SuiteOptions

    if topology == "local" and (experts or slots_per_layer):
        flag = "--experts" if experts else "--slots-per-layer"
        raise CommandError(f"{flag}: the local topology has no expert workers", Exit.USAGE)
    options = SuiteOptions(
        topology=topology,
        model=model,
        attention=attention,
        experts=experts or DEFAULT_EXPERT_WORKERS,
        slots_per_layer=slots_per_layer or 0,
        host=host,
        port=port or free_ports(1)[0],
    )
    started = time.monotonic()

    def on_ready(state: "SuiteState") -> None:
        if as_json:
            print_json(ready_facts(state))
        else:
            print(ready_text(state, time.monotonic() - started, detach), flush=True)

    if detach:
        from moesaic.cli.background import start_in_background

        on_ready(start_in_background(command_flags(options, timeout)))
    else:
        from moesaic.cli.launch import run_suite

        run_suite(options, timeout, on_ready)
        say("stopped")


def down(
    timeout: Annotated[
        float, typer.Option(min=0, help="Seconds that running requests get before the end.")
    ] = 60,
) -> None:
    """Stop the suite that was started in this directory."""
    from moesaic.cli.background import stop_suite

    print(stop_suite(timeout))


def command_flags(options: "SuiteOptions", timeout: float) -> list[str]:
    """The flags of ``moesaic up`` that ask for the same suite, in the foreground."""
    flags = {
        "--topology": options.topology,
        "--model": options.model,
        "--attention": options.attention,
        "--host": options.host,
        "--port": options.port,
        "--timeout": timeout,
    }
    if options.topology == "disaggregated":
        flags["--experts"] = options.experts
        if options.slots_per_layer:
            flags["--slots-per-layer"] = options.slots_per_layer
    return [str(part) for flag in flags.items() for part in flag]


def model_name(state: "SuiteState") -> str:
    """The name that the gateway gives the model."""
    from pathlib import Path

    return Path(state.model).resolve().name


def ready_facts(state: "SuiteState") -> dict[str, Any]:
    """What ``--json`` prints once the suite is ready."""
    import msgspec

    return {
        "url": state.url,
        "model": model_name(state),
        "topology": state.topology,
        "pid": state.pid,
        "processes": msgspec.to_builtins(state.processes),
    }


def ready_text(state: "SuiteState", took_s: float, detached: bool) -> str:
    """What people read once the suite is ready: where to call, and how."""
    name = model_name(state)
    question = {"model": name, "input": "i want to book a flight", "labels": ["travel", "banking"]}
    chat = {"model": name, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 64}
    end = "moesaic down" if detached else "Ctrl-C"

    def curl(route: str, body: dict[str, Any]) -> str:
        header = "-H 'Content-Type: application/json'"
        return f"curl -s {state.url}{route} {header} -d '{json.dumps(body)}'"

    return f"""
Moesaic serves {name} at {state.url} ({state.topology}, ready after {took_s:.1f} s)

Classify:  {curl("/v1/classify", question)}
Chat:      {curl("/v1/chat/completions", chat)}
Or:        moesaic classify 'i want to book a flight' --labels travel,banking
           moesaic generate 'Hello!'

Services and their admin addresses: moesaic status      Logs: run/*.log      Stop: {end}
"""
