"""Options that several commands share, so that they read the same everywhere."""

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, get_args

import typer

from moesaic.cli.terminal.outcome import CommandError, Exit
from moesaic.messages.order import Order
from moesaic.usage.variables import ENV_PREFIX

Command = Callable[..., None]
LARGEST = 4096  # whole number in a policy: workers of a side, experts of a group


def valid_text(value: str | None) -> str | None:
    """Refuse an argument that is not valid UTF-8; the callback of options that are sent to a service."""
    try:
        (value or "").encode()
    except UnicodeEncodeError as error:
        raise typer.BadParameter("not valid UTF-8") from error
    return value


JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
_URL: dict[str, Any] = {
    "envvar": "MOESAIC_URL",
    "help": "Address of the gateway (default: the suite started here, else http://127.0.0.1:8000).",
}
UrlOption = Annotated[str | None, typer.Option("--url", **_URL)]
UrlArgument = Annotated[str | None, typer.Argument(metavar="URL", show_default=False, **_URL)]
SchedulerOption = Annotated[
    str,
    typer.Option(
        "--scheduler",
        envvar="MOESAIC_SCHEDULER",
        help="Admin address of the scheduler, host:port (default: that of the suite started here).",
    ),
]


def option(text: str, *, switch: str = "", panel: str | None = None, **more: Any) -> Any:
    """Describe a field that is an option of a command: the mark of its annotation.

    Args:
        text: for the help.
        switch: the flag of a field that is true or false.
        panel: of the help; None: the general one.
        more: of ``typer.Option``.
    """
    return typer.Option(*filter(None, [switch]), help=text, rich_help_panel=panel, **more)


def takes(
    model: Callable[..., Any], *names: str, variables: bool = True
) -> Callable[[Command], Command]:
    """Give a command the fields of a dataclass as options; their values come as ``values``, by field.

    Each has its default.

    Args:
        model: fields whose annotation has an ``option`` are taken.
        names: only these fields; none: all.
        variables: each option is also read from the variable ``MOESAIC_`` with its name.
    """
    found = taken_fields(model)
    made = {name: each for name, each in found.items() if name in names or not names}
    for name, each in made.items() if variables else ():
        [mark] = each.annotation.__metadata__
        mark.envvar = f"{ENV_PREFIX}{name.upper()}"
    return functools.partial(_with_options, made=made)


def taken_fields(model: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """List the fields of a dataclass that are options, by name."""
    fields = inspect.signature(model, eval_str=True).parameters
    return {name: each for name, each in fields.items() if hasattr(each.annotation, "__metadata__")}


def policy_flag(name: str) -> str:
    """Name the option that sets this field of a policy."""
    return "--" + name.removesuffix("_s").replace("_", "-")


def sets(policy: type) -> Callable[[Command], Command]:
    """Give a command the fields of a policy as options; those that are given come as ``values``, by field.

    Args:
        policy: an ``Order`` that says under ``Attributes`` what each field of its own means.
    """
    meanings = dict(
        re.findall(r"^ {8}(\w+): (.+(?:\n {9,}.+)*)", policy.__doc__ or "", re.MULTILINE)
    )
    made = {}
    for name, each in inspect.signature(policy).parameters.items():
        # Those are the scheduler's.
        if name not in Order.__struct_fields__:
            text = " ".join(meanings[name].replace("``", "").split())
            # Of a choice, which the scheduler checks.
            words = get_args(each.annotation)
            mark = typer.Option(
                policy_flag(name),
                help=text,
                metavar=f"<{'|'.join(words)}>" if words else None,
                callback=valid_text if words else None,
                autocompletion=completes(words),
            )
            kind: Any = Annotated[(str if words else each.annotation) | None, mark]
            made[name] = each.replace(annotation=kind, default=None)

    def decorate(command: Command) -> Command:
        def change(*, values: dict[str, Any], **others: Any) -> None:
            changes = {name: value for name, value in values.items() if value is not None}
            for name, value in changes.items():
                if type(value) is int and not 0 <= value <= LARGEST:
                    text = f"{policy_flag(name)} must be in 0..{LARGEST}, got {value}"
                    raise CommandError(text, Exit.USAGE)
            if not changes:
                text = "nothing to set; name a part of the policy, such as --mode"
                raise CommandError(text, Exit.USAGE)
            command(**others, values=changes)

        return _with_options(functools.wraps(command)(change), made=made)

    return decorate


def completes(words: Sequence[str]) -> Callable[[str], list[str]]:
    """Make the completion of an option's value, which is one of these words; none: shells know nothing."""

    def choices(incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete)]

    return choices


def _with_options(command: Command, made: dict[str, inspect.Parameter]) -> Command:
    """Make a command that takes parameters, and hands their values on as ``values``."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    own = inspect.signature(command, eval_str=True).parameters

    @functools.wraps(command)
    def run(**given: Any) -> None:
        values = {name: given.pop(name) for name in made}
        command(**given, values=values)

    parameters = [each for name, each in [*made.items(), *own.items()] if name != "values"]
    of_typer = [each.replace(kind=keyword) for each in parameters]
    vars(run)["__signature__"] = inspect.Signature(of_typer)
    run.__annotations__ = {}
    return run
