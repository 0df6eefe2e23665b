"""Flags of a settings model, one for each field, and their reading from a command line."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, GetCoreSchemaHandler, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core.core_schema import CoreSchema, no_info_after_validator_function

from moesaic.plugins import plugins
from moesaic.usage.modes import SETTING, listed, missing_in, modes_of
from moesaic.usage.nearest import proposal

MODEL = "--model"
OTHERS = "Options"  # the group of fields that come before any marked one


@dataclass(frozen=True)
class Unlisted:
    """Choices that a setting takes but its help does not show."""

    choices: tuple[str, ...]


@dataclass(frozen=True)
class OneOf:
    """The mark of a text that must be one of these names, or one that a package adds, which no help shows.

    Attributes:
        names: that help and completion show.
        plugins: the kind of what packages add; see ``moesaic.plugins``.
    """

    names: tuple[str, ...]
    plugins: str

    def __get_pydantic_core_schema__(
        self, source: type[str], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Check the text once it is one."""
        return no_info_after_validator_function(self._checked, handler(source))

    def _checked(self, text: str) -> str:
        if text not in self.names and text not in plugins(self.plugins):
            raise ValueError(f"must be one of {', '.join(self.names)}")
        return text


@dataclass(frozen=True)
class Flag:
    """One setting, as people see it.

    Attributes:
        field: its name in the model.
        group: its group in the help.
        form: of its value, such as ``<int>``; empty for a switch.
        bounds: of its numbers, such as ``1<=x<=64``; empty if there are none.
        default: value without the flag; empty if there is none, or if the description names it.
    """

    field: str
    group: str
    description: str
    form: str = ""
    bounds: str = ""
    default: str = ""
    required: bool = False
    secret: bool = False
    on: bool = False  # a switch that is on by default
    modes: tuple[str, ...] = ()  # values of --dispatch that have it; none: all

    @property
    def name(self) -> str:
        """The typed form: ``--slots-per-layer``."""
        return "--" + self.field.replace("_", "-")

    @property
    def off_name(self) -> str:
        """The form that turns a switch off: ``--no-offload``; empty for other flags."""
        has_one = not self.form and not self.field.startswith("no_")
        return f"--no-{self.name[2:]}" if has_one else ""

    @property
    def names(self) -> tuple[str, ...]:
        """All typed forms."""
        return (self.name, self.off_name) if self.off_name else (self.name,)


class WrongFlag(Exception):
    """A command line cannot be read: one line for people."""


def flags_of(model: type[BaseModel], groups: Mapping[str, str]) -> list[Flag]:
    """Make the flags of a model, group by group, each in the order of its fields.

    Args:
        model: its fields are numbers, texts, secrets, switches or a choice of texts.
        groups: fields that begin a group, with its title; later fields belong to it too. Titles are in order.
            Fields of some modes are a group for those modes, behind that of the choice.

    Returns:
        All fields but those of modes that the model does not have.
    """
    group = choice = OTHERS
    flags: list[Flag] = []
    modes, missing, baselines = modes_of(model), missing_in(model), set[str]()
    titles = [OTHERS, *dict.fromkeys(groups.values())]
    for name, field in model.model_fields.items():
        group = group if name in modes else groups.get(name, group)
        if name == SETTING:
            choice, baselines = group, _unlisted(field)
        if name in missing:
            continue
        title = group
        if name in modes:
            shown = [mode for mode in modes[name] if mode not in baselines]
            title = f"{choice} with --{SETTING} {listed(shown)}"
            if title not in titles:
                titles.insert(titles.index(choice) + 1, title)
        secret, default = field.annotation is SecretStr, field.default
        switch = field.annotation is bool
        says_nothing = secret or switch or field.is_required() or default == ""
        flags.append(
            Flag(
                field=name,
                group=title,
                description=field.description or "",
                form="" if switch else _form(field),
                bounds=_bounds(field),
                default="" if says_nothing else _shown(default),
                required=field.is_required(),
                secret=secret,
                on=switch and default is True,
                modes=modes.get(name, ()),
            )
        )
    return sorted(flags, key=lambda flag: titles.index(flag.group))


def read_flags(flags: Sequence[Flag], arguments: Sequence[str]) -> dict[str, str | bool]:
    """Read settings from a command line; of a repeated flag the last one counts.

    ``--slots-per-layer 16`` and ``--slots-per-layer=16`` are the same. A first word without dashes is the model, where
    there is a ``--model``.

    Returns:
        Values by field.

    Raises:
        WrongFlag: a word is no flag, or a value is missing.
    """
    known = {name: flag for flag in flags for name in flag.names}
    given: dict[str, str | bool] = {}
    if MODEL in known and arguments and not arguments[0].startswith("-"):
        arguments = [MODEL, *arguments]
    rest = iter(arguments)
    for argument in rest:
        name, has_value, value = argument.partition("=")
        flag = known.get(name)
        if flag is None:
            wanted = proposal(name, known) if name.startswith("-") else ", flags begin with --"
            raise WrongFlag(f"{name}: unknown flag{wanted}")
        if not flag.form:
            if has_value:
                raise WrongFlag(f"{name}: takes no value, got {value!r}")
            given[flag.field] = name == flag.name
        elif has_value:
            given[flag.field] = value
        else:
            given[flag.field] = _next_value(flag, next(rest, None), known)
    return given


def _next_value(flag: Flag, value: str | None, known: dict[str, Flag]) -> str:
    if value is None or value.partition("=")[0] in known:
        got = "nothing" if value is None else value
        raise WrongFlag(f"{flag.name}: a value is needed ({flag.form}), got {got}")
    return value


def _form(field: FieldInfo) -> str:
    annotation: Any = field.annotation
    for mark in field.metadata:
        if isinstance(mark, OneOf):
            return f"<{'|'.join(mark.names)}>"
    if get_origin(annotation) is Literal:
        hidden = _unlisted(field)
        return f"<{'|'.join(each for each in get_args(annotation) if each not in hidden)}>"
    return {int: "<int>", float: "<float>"}.get(annotation, "<str>")


def _unlisted(field: FieldInfo) -> set[str]:
    return {c for mark in field.metadata if isinstance(mark, Unlisted) for c in mark.choices}


def _shown(default: object) -> str:
    return f"{default:g}" if isinstance(default, float) else str(default)


def _bounds(field: FieldInfo) -> str:
    least = greatest = ""
    for bound in field.metadata:
        if isinstance(bound, Ge):
            least = f"{bound.ge}<="
        elif isinstance(bound, Gt):
            least = f"{bound.gt}<"
        elif isinstance(bound, Le):
            greatest = f"<={bound.le}"
        elif isinstance(bound, Lt):
            greatest = f"<{bound.lt}"
    return f"{least}x{greatest}" if least or greatest else ""
