"""The ``moesaic`` command. Commands import what they need when they run: the start is quick."""

import os
import sys
from typing import Annotated

import typer

from moesaic.cli import (
    api_keys,
    bench,
    classify,
    doctor,
    experts,
    generate,
    placement,
    run_batch,
    serve,
    status,
    token,
    trace,
    up,
)
from moesaic.cli.console import say
from moesaic.cli.outcome import CommandError, Exit
from moesaic.errors import MoesaicError

app = typer.Typer(
    name="moesaic",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
# What stands behind the role, --help included, is for the service.
PASS_THROUGH = {"allow_extra_args": True, "allow_interspersed_args": False}
# Flags of services are not its own, but it says how to give them.
EXPLAINING = {"allow_extra_args": True, "ignore_unknown_options": True}

app.command(context_settings=EXPLAINING)(up.up)
app.command()(up.down)
app.command()(status.status)
app.command()(token.token)
app.command()(classify.classify)
app.command()(generate.generate)
app.command()(run_batch.run_batch)
app.command()(doctor.doctor)
app.command()(bench.bench)
app.add_typer(api_keys.app, name="api-key")
app.add_typer(trace.app, name="trace")
app.add_typer(placement.app, name="placement")
app.add_typer(experts.app, name="experts")
app.command(context_settings=PASS_THROUGH)(serve.serve)


def _print_version(wanted: bool) -> None:
    from importlib.metadata import version

    if wanted:
        print(f"moesaic {version('moesaic')}")
        raise typer.Exit


@app.callback()
def shared(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
    secret: Annotated[
        str,
        typer.Option(
            envvar="MOESAIC_SECRET",
            help="Secret of a cluster that was not started here; better given by the variable, "
            "which others cannot see.",
        ),
    ] = "",
) -> None:
    """Serve Mixture-of-Experts language models as small, independently deployable services."""
    from moesaic.usage.names import unknown_variables

    explains = "--help" in sys.argv[1:] or context.invoked_subcommand == "doctor"  # that finds them
    if not explains and (problems := unknown_variables(os.environ)):
        raise CommandError("\n".join(problems), Exit.USAGE)
    if secret:
        os.environ["MOESAIC_SECRET"] = secret  # where commands look for it


def main() -> None:
    """Run the command line; problems become one line on standard error and an exit status."""
    try:
        app()
    except CommandError as error:
        say(f"moesaic: {error}")
        sys.exit(error.status)
    except MoesaicError as error:
        say(f"moesaic: {error}")
        sys.exit(Exit.ERROR)
    except BrokenPipeError:
        sys.stderr.close()  # who read the output has left; nothing more can be said
        sys.exit(Exit.ERROR)
