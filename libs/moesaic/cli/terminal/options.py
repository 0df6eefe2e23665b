"""Options that several commands share, so that they read the same everywhere."""

from typing import Annotated

import typer


def valid_text(value: str | None) -> str | None:
    """Refuse an argument that is not valid UTF-8; the callback of options that are sent to a service."""
    try:
        (value or "").encode()
    except UnicodeEncodeError as error:
        raise typer.BadParameter("not valid UTF-8") from error
    return value


JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
UrlOption = Annotated[
    str | None,
    typer.Option(
        "--url",
        envvar="MOESAIC_URL",
        help="Address of the gateway (default: the suite started here, else http://127.0.0.1:8000).",
    ),
]
