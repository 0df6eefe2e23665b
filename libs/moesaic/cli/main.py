"""The ``moesaic`` command. Commands import what they need when they run: the start is quick."""

import sys

import typer

from moesaic.cli import bench, classify, doctor, generate, serve, status, up
from moesaic.cli.console import say
from moesaic.cli.outcome import CommandError, Exit
from moesaic.errors import MoesaicError

app = typer.Typer(
    name="moesaic",
    help="Serve Mixture-of-Experts language models as small, independently deployable services.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

app.command()(up.up)
app.command()(up.down)
app.command()(status.status)
app.command()(classify.classify)
app.command()(generate.generate)
app.command()(doctor.doctor)
app.command()(bench.bench)
app.command(context_settings=PASS_THROUGH)(serve.serve)


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
