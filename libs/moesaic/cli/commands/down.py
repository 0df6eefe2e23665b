"""``moesaic down``: the end of the suite of this directory."""

from typing import Annotated

import typer


def down(
    timeout: Annotated[
        float, typer.Option(min=0, help="Longest time for running requests to finish, in seconds.")
    ] = 60,
) -> None:
    """Stop the suite that was started in this directory."""
    from moesaic.cli.suite.background import stop_suite

    print(stop_suite(timeout))
