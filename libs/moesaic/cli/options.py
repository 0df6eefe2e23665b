"""Options that several commands share, so that they read the same everywhere."""

from typing import Annotated

import typer

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
UrlOption = Annotated[
    str | None,
    typer.Option(
        "--url",
        envvar="MOESAIC_URL",
        help="Address of the gateway (default: the suite started here, else http://127.0.0.1:8000).",
    ),
]
