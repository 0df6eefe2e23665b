"""``moesaic serve``: run one service in this process."""

import sys
from typing import Annotated, Literal

import typer

Role = Literal["gateway", "attention", "expert", "scheduler", "edge-agent"]


def serve(
    context: typer.Context,
    role: Annotated[Role, typer.Argument(help="Service to run.")],
) -> None:
    """Run one service; all further flags are its own (see 'moesaic serve ROLE --help')."""
    from importlib import import_module

    from moesaic.cli.suite.processes import module_of

    # Services read their flags from the command line, as when they are started by their own names.
    sys.argv = [f"moesaic serve {role}", *context.args]
    import_module(f"{module_of(role)}.__main__").main()
