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
MemoryFractionOption = Annotated[
    float,
    typer.Option(
        envvar="MOESAIC_MEMORY_FRACTION",
        min=0.05,
        max=1.0,
        help="Part of the free memory of the machine, and of each GPU, that the suite may take.",
    ),
]
DevicesOption = Annotated[
    str,
    typer.Option(
        envvar="MOESAIC_DEVICES",
        metavar="auto|cpu|cuda:0,cuda:1",
        help="Devices to share out among the workers; auto: all GPUs that torch sees, or the CPU where there are none "
        "and for what needs it (--quantization, --offload, gathered and edge).",
    ),
]
UrlOption = Annotated[
    str | None,
    typer.Option(
        "--url",
        envvar="MOESAIC_URL",
        help="Address of the gateway (default: the suite started here, else http://127.0.0.1:8000).",
    ),
]
