"""The ``moesaic`` command. Commands import what they need when they run: the start is quick."""

import os
import sys
from typing import Annotated

import typer

import moesaic
from moesaic.cli.commands import (
    api_key,
    bench,
    brownout,
    chat,
    classify,
    deploy,
    doctor,
    experts,
    generate,
    placement,
    plan,
    run_batch,
    scale,
    serve,
    status,
    token,
    top,
    trace,
    up,
)
from moesaic.cli.commands.installed import Commands
from moesaic.cli.suite.service_settings import SettingsCommand
from moesaic.cli.terminal.console import say
from moesaic.cli.terminal.outcome import CommandError, Exit
from moesaic.errors import MoesaicError
from moesaic.usage.packages import how_to_install, missing_packages

app = typer.Typer(
    name="moesaic",
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
# All words behind the role, --help included, are the service's.
PASS_THROUGH = {"allow_extra_args": True, "allow_interspersed_args": False}

app.command(cls=SettingsCommand)(up.up)
app.command(cls=SettingsCommand)(plan.plan)
app.command()(up.down)
app.command()(status.status)
app.command()(top.top)
app.command()(token.token)
app.command()(classify.classify)
app.command()(generate.generate)
app.command()(chat.chat)
app.command()(run_batch.run_batch)
app.command()(doctor.doctor)
app.add_typer(bench.app, name="bench")
app.add_typer(deploy.app, name="deploy")
app.add_typer(api_key.app, name="api-key")
app.add_typer(trace.app, name="trace")
app.add_typer(placement.app, name="placement")
app.add_typer(experts.app, name="experts")
app.add_typer(brownout.app, name="brownout")
app.add_typer(scale.app, name="scale")
app.command(cls=serve.RoleCommand, context_settings=PASS_THROUGH)(serve.serve)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"moesaic {moesaic.__version__}")
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
            help="Secret of a cluster that was not started here; set it by the variable to hide "
            "it from other users.",
        ),
    ] = "",
) -> None:
    """Serve Mixture-of-Experts language models as small, independently deployable services."""
    from moesaic.usage.names import unknown_variables

    explains = (
        "--help" in sys.argv[1:] or context.invoked_subcommand == "doctor"
    )  # it reports them itself
    if not explains and (problems := unknown_variables(os.environ)):
        raise CommandError("\n".join(problems), Exit.USAGE)
    if secret:
        # Where commands look for it.
        os.environ["MOESAIC_SECRET"] = secret


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
    except ModuleNotFoundError as error:
        # A command may need a package of an extra, such as huggingface_hub for a name on the hub.
        if not (missing := missing_packages("all")):
            raise
        how = how_to_install(torch="torch" in missing)
        say(f"moesaic: the package {error.name} is not installed -> {how}")
        sys.exit(Exit.USAGE)
    except BrokenPipeError:
        # The reader of the output has left.
        sys.stderr.close()
        sys.exit(Exit.ERROR)
