"""Options that several commands share, so that they read the same everywhere."""

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

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


def takes(
    model: Callable[..., Any], *names: str
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the fields of a dataclass as options; their values come as ``values``, by field.

    Args:
        model: those of its fields whose annotation has a ``typer.Option`` become options, with their defaults.
        names: only these fields; none: all.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters
        made = {
            name: field.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for name, field in inspect.signature(model, eval_str=True).parameters.items()
            if hasattr(field.annotation, "__metadata__") and (name in names or not names)
        }

        @functools.wraps(command)
        def run(**given: Any) -> None:
            values = {name: given.pop(name) for name in made}
            command(**given, values=values)

        parameters = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for name, parameter in own.items()
            if name != "values"
        ]
        vars(run)["__signature__"] = inspect.Signature([*made.values(), *parameters])
        run.__annotations__ = {}
        return run

    return decorate
