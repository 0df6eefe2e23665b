"""``moesaic up`` and ``moesaic down``: a whole suite on this machine."""

import json
import shlex
import time
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from moesaic.cli.api_key import (
    API_KEY_VARIABLE,
    KEYS_FILE_VARIABLE,
    check_exposure,
    checked_api_key,
    checked_keys_file,
)
from moesaic.cli.console import print_json, say
from moesaic.cli.options import JsonOption
from moesaic.cli.outcome import CommandError, Exit

if TYPE_CHECKING:
    from moesaic.cli.state import SuiteState
    from moesaic.cli.suite import SuiteOptions

DEFAULT_EXPERT_WORKERS = 2
SETTINGS_PANEL = "Settings of the services"


def up(
    context: typer.Context,
    topology: Annotated[
        Literal["local", "disaggregated", "gathered", "all-to-all"],
        typer.Option(
            envvar="MOESAIC_TOPOLOGY",
            help="Experts in every attention worker; in workers of their own; or divided among the "
            "attention workers, which fetch the others' layer by layer (gathered) or compute "
            "every layer together (all-to-all, for comparison).",
        ),
    ] = "disaggregated",
    model: Annotated[
        str, typer.Option(envvar="MOESAIC_MODEL", help="HF-format model directory.")
    ] = "models/demo",
    attention: Annotated[
        int, typer.Option(envvar="MOESAIC_ATTENTION", min=1, max=64, help="Attention workers.")
    ] = 1,
    experts: Annotated[
        int | None,
        typer.Option(envvar="MOESAIC_EXPERTS", min=1, max=256, help="Expert workers (default: 2)."),
    ] = None,
    slots_per_layer: Annotated[
        int | None,
        typer.Option(
            envvar="MOESAIC_SLOTS_PER_LAYER",
            min=1,
            help="Expert slots of each expert worker per layer (default: enough).",
        ),
    ] = None,
    offload: Annotated[
        bool,
        typer.Option(
            "--offload",
            help="Let attention workers keep experts in files, and only a few layers of them in "
            "memory; disaggregated: for steps in which that is faster than expert workers.",
        ),
    ] = False,
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
            help="Key that callers must send; better given by the variable, which others cannot see.",
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
            help="Name of the model in the API (default: the directory's).",
        ),
    ] = None,
    quantization: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=SETTINGS_PANEL,
            help="int8: round weights to 8 bits, on a CPU (default: none).",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=SETTINGS_PANEL,
            help="Of weights and activations: float32 or bfloat16 (default: float32).",
        ),
    ] = None,
    log_level: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=SETTINGS_PANEL,
            help="Least severe level to log: debug, info, warning or error (default: info).",
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds the start may take.")] = 600,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return when ready, and run in the background.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Start a suite of services and keep it running until Ctrl-C.

    Every setting of a service is a flag here, too, such as --max-num-seqs 128, and reaches the services
    that have it: 'moesaic serve ROLE --help' lists them.
    """
    from moesaic.cli.service_settings import service_flags
    from moesaic.cli.suite import SuiteOptions

    named = {
        "--served-model-name": served_model_name,
        "--quantization": quantization,
        "--dtype": dtype,
        "--log-level": log_level,
    }
    given = [f"{flag}={value}" for flag, value in named.items() if value is not None]
    own = [name for parameter in context.command.params for name in parameter.opts]
    settings = service_flags([*given, *context.args], own)
    if topology != "disaggregated" and (experts or slots_per_layer):
        flag = "--experts" if experts else "--slots-per-layer"
        raise CommandError(f"{flag}: the {topology} topology has no expert workers", Exit.USAGE)
    if topology == "all-to-all" and offload:
        raise CommandError("--offload: the all-to-all topology has no such mode", Exit.USAGE)
    wants_key = bool(checked_api_key(api_key) or api_keys_file)
    check_exposure(host, wants_key, no_auth)
    options = SuiteOptions(
        topology=topology,
        model=model,
        attention=attention,
        experts=experts or DEFAULT_EXPERT_WORKERS,
        slots_per_layer=slots_per_layer or 0,
        offload=offload,
        host=host,
        port=port,
        api_key=api_key,
        api_keys_file=checked_keys_file(api_keys_file),
        no_auth=no_auth,
        settings=settings,
    )
    started = time.monotonic()

    def on_ready(state: "SuiteState") -> None:
        if as_json:
            print_json(ready_facts(state))
        else:
            took_s = time.monotonic() - started
            print(ready_text(state, took_s, detached=detach, wants_key=wants_key), flush=True)

    if detach:
        from moesaic.cli.background import start_in_background

        flags = command_flags(options, timeout)
        on_ready(start_in_background(flags, {API_KEY_VARIABLE: api_key}))
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
    """The flags of ``moesaic up`` that ask for the same suite, in the foreground.

    The API key is not among them: flags can be read by every user of the machine.
    """
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
    if options.api_keys_file:
        flags["--api-keys-file"] = options.api_keys_file
    switches = ["--no-auth"] if options.no_auth else []
    if options.offload:
        switches.append("--offload")
    settings = [setting.flag for setting in options.settings]
    return [*(str(part) for flag in flags.items() for part in flag), *switches, *settings]


def ready_facts(state: "SuiteState") -> dict[str, Any]:
    """What ``--json`` prints once the suite is ready."""
    import msgspec

    return {
        "url": state.url,
        "model": state.model_name,
        "topology": state.topology,
        "pid": state.pid,
        "processes": msgspec.to_builtins(state.processes),
    }


def typed_command() -> str:
    """What to type to run this command again from this directory."""
    import shutil
    import sys
    from pathlib import Path

    if shutil.which("moesaic"):
        return "moesaic"
    module = Path(sys.argv[0]).name != "moesaic"  # run as python -m moesaic.cli
    program = Path(sys.executable if module else sys.argv[0]).absolute()
    if program.is_relative_to(Path.cwd()):
        program = program.relative_to(Path.cwd())
    return shlex.quote(str(program)) + (" -m moesaic.cli" if module else "")


def ready_text(state: "SuiteState", took_s: float, *, detached: bool, wants_key: bool) -> str:
    """What people read once the suite is ready: where to call, and how."""
    name = state.model_name
    question = {"model": name, "input": "i want to book a flight", "labels": ["travel", "banking"]}
    chat = {"model": name, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 64}
    moesaic = typed_command()
    end = f"{moesaic} down" if detached else "Ctrl-C"
    headers = "-H 'Content-Type: application/json'"
    if wants_key:
        headers += f' -H "Authorization: Bearer ${API_KEY_VARIABLE}"'

    def curl(route: str, body: dict[str, Any]) -> str:
        return f"curl -s {state.url}{route} {headers} -d {shlex.quote(json.dumps(body))}"

    return f"""
Moesaic serves {name} at {state.url} ({state.topology}, ready after {took_s:.1f} s)

Classify:  {curl("/v1/classify", question)}
Chat:      {curl("/v1/chat/completions", chat)}
Or:        {moesaic} classify 'i want to book a flight' --labels travel,banking
           {moesaic} generate 'Hello!'

Services and their admin addresses: {moesaic} status      Logs: run/*.log      Stop: {end}
"""
