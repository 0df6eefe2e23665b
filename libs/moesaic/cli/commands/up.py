"""``moesaic up`` and ``moesaic down``: a whole suite on this machine."""

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moesaic.cli.suite.config import ConfigOption, ModelArgument
from moesaic.cli.suite.options import SuiteOptions
from moesaic.cli.terminal.console import print_json, say
from moesaic.cli.terminal.options import JsonOption, takes

if TYPE_CHECKING:
    from moesaic.cli.machine.state import SuiteState


@takes(SuiteOptions)
def up(
    context: typer.Context,
    values: dict[str, Any],
    named: ModelArgument = "",
    config: ConfigOption = None,
    timeout: Annotated[
        float, typer.Option(min=1, help="Longest time for the start, in seconds.")
    ] = 600,
    detach: Annotated[
        bool, typer.Option("--detach", help="Run in the background; return when ready.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Start a suite of services for MODEL, and keep it running until Ctrl-C.

    All settings of services are also flags here, such as --max-num-seqs 128. They hold for all services
    that have them; 'moesaic serve ROLE --help' lists them.
    """
    from dataclasses import replace

    from moesaic.cli.checks.exposure import check_exposure, checked_keys_file
    from moesaic.cli.checks.model_names import given_model
    from moesaic.cli.checks.preflight import check_packages
    from moesaic.cli.clients.rest_key import API_KEY_VARIABLE, checked_api_key
    from moesaic.cli.suite.processes import roles_of
    from moesaic.cli.suite.ready import ready_facts, ready_text
    from moesaic.cli.suite.service_settings import asked_options
    from moesaic.loopback import plain_host

    options = asked_options(context, values, named)
    check_packages(options.topology, roles_of(options.topology))
    wants_key = bool(checked_api_key(options.api_key) or options.api_keys_file)
    host = plain_host(options.host)
    check_exposure(host, wants_key, options.no_auth)
    keys_file = checked_keys_file(options.api_keys_file)
    options = replace(options, model=given_model(options.model), host=host, api_keys_file=keys_file)
    started = time.monotonic()

    def on_ready(state: "SuiteState") -> None:
        if as_json:
            print_json(ready_facts(state))
        else:
            took_s = time.monotonic() - started
            print(ready_text(state, took_s, detached=detach, wants_key=wants_key), flush=True)

    if detach:
        from moesaic.cli.suite.background import start_in_background
        from moesaic.cli.suite.prepare import prepared

        # A download shows its progress here.
        options = prepared(options).options
        flags = [*options.flags, "--timeout", str(timeout)]
        on_ready(start_in_background(flags, {API_KEY_VARIABLE: options.api_key}))
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
