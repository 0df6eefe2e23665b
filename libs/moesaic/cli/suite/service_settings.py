"""Settings of the services as options of the commands that start or plan a suite."""

import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from moesaic.cli.suite.options import Setting, SuiteOptions, Topology, check_topology
from moesaic.cli.suite.processes import DISPATCHES, Service, roles_of
from moesaic.cli.terminal.options import completes
from moesaic.cli.terminal.outcome import CommandError, Exit
from moesaic.usage.names import ROLES, settings_model

if TYPE_CHECKING:
    from moesaic.settings import ServiceSettings
    from moesaic.usage.flags import Flag

# Settings that the suite chooses for each process, or takes under another name.
ITS_OWN = {
    *("worker_id", "host", "control_host", "advertise_host", "admin_port", "metrics_port"),
    *("data_host", "data_port", "weights_port", "grace_s", "threads", "dispatch", "share"),
    *("memory_bytes", "site", "standby"),
}
PANEL = "Settings of the services"
# In the help of the suite's commands; the others are for completion.
SHOWN = {"served_model_name", "quantization", "dtype", "log_level"}
GIVEN_AS = {
    "memory_bytes": "--memory",
    "standby": "--standby-attention or --standby-experts",
}


class SettingsCommand(TyperCommand):
    """A command that takes every setting of the services as an option, besides its own ones.

    The values that were given are in ``context.obj``, by field. Help shows the usual ones, completion all of them.
    """

    def get_params(self, ctx: Any) -> list[Any]:
        """List its own options, then those of settings."""
        own = super().get_params(ctx)
        names = {param.name for param in own}
        return [
            *own,
            *(param for param in _options(ctx.resilient_parsing) if param.name not in names),
        ]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the command line; a flag that does not exist is refused with the nearest one."""
        if not ctx.resilient_parsing and "--help" not in args:
            _check_names(args, self.get_params(ctx))
        rest = super().parse_args(ctx, args)
        of_settings = set(ctx.params) - {param.name for param in self.params}
        found = {name: ctx.params.pop(name) for name in of_settings}
        ctx.obj = {name: value for name, value in found.items() if value is not None}
        return rest


def asked_options(context: typer.Context, values: Mapping[str, Any], named: str) -> SuiteOptions:
    """Make the options of a suite from a command line: a ``SettingsCommand`` that takes ``SuiteOptions``.

    Args:
        context: of the command.
        values: by field.
        named: the model as the command's argument; empty: ``values`` has it, if it was given.

    Raises:
        CommandError: the topology does not take what was given, or two models were given.
    """
    source = context.get_parameter_source("model")
    if named and source and source.name == "COMMANDLINE" and named != values["model"]:
        text = f"--model {values['model']}: the model is {named} already; give one of them"
        raise CommandError(text, Exit.USAGE)
    values = {**values, "model": named or values["model"]}
    sources = {name: context.get_parameter_source(name) for name in values}
    given = {name: values[name] for name, of in sources.items() if of and of.name != "DEFAULT"}
    check_topology(values["topology"], given)
    return SuiteOptions(**values, settings=given_settings(context.obj, values["topology"]))


def given_settings(values: Mapping[str, str | bool], topology: Topology) -> tuple[Setting, ...]:
    """Give settings to those services of a suite that have them.

    Args:
        values: by field.
        topology: of the suite.

    Raises:
        CommandError: no service of that topology has one of them.
    """
    settings = []
    for field, value in values.items():
        flag, modes = _settings()[field]
        dispatch = DISPATCHES[topology]
        there = frozenset(role for role in roles_of(topology) if dispatch in modes.get(role, ()))
        if not there:
            raise CommandError(
                f"{flag.name}: the {topology} topology has no service with this setting", Exit.USAGE
            )
        settings.append(Setting(_typed(flag, value), there))
    return tuple(settings)


@cache
def _settings() -> "dict[str, tuple[Flag, dict[str, tuple[str, ...]]]]":
    """The settings of all services by field, each with its modes by the roles that have it."""
    from moesaic.usage.reading import flags_in

    found: dict[str, tuple[Flag, dict[str, tuple[str, ...]]]] = {}
    for role in ROLES:
        for flag in flags_in(settings_model(role)):
            _, modes = found.setdefault(flag.field, (flag, {}))
            modes[role] = flag.modes or tuple(DISPATCHES.values())
    return found


@cache
def _options(complete: bool) -> list[Any]:
    """Make the options of settings for a suite; help shows only the usual ones, completion all of them."""
    flags = [flag for flag, _ in _settings().values()]
    given = [flag for flag in flags if flag.field not in ITS_OWN and not flag.secret]
    return options_of(given, () if complete else set(_settings()) - SHOWN)


def options_of(flags: "Iterable[Flag]", hidden: Collection[str] = ()) -> list[Any]:
    """Make options of settings: texts and switches, None where they are not given.

    Args:
        flags: of services.
        hidden: fields that help leaves out.
    """

    def takes(**_: object) -> None:
        """Take all of them."""

    parameters = [_parameter(flag, flag.field in hidden) for flag in flags]
    vars(takes)["__signature__"] = inspect.Signature(parameters)
    app = typer.Typer(add_completion=False)
    app.command()(takes)
    return [each for each in typer.main.get_command(app).params if each.name != "help"]


def _parameter(flag: "Flag", hidden: bool) -> inspect.Parameter:
    words = flag.form.strip("<>").split("|")
    option = typer.Option(
        "/".join(flag.names),
        metavar=flag.form or None,
        help=flag.description,
        hidden=hidden,
        rich_help_panel=PANEL,
        autocompletion=completes(words if len(words) > 1 else ()),
    )
    kind: Any = Annotated[str | None if flag.form else bool | None, option]
    return inspect.Parameter(
        flag.field, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind
    )


def check_settings(services: Iterable[Service]) -> dict[str, "ServiceSettings"]:
    """Make sure that every service can start with its flags and the variables of this process.

    Returns:
        The settings of each service, by its name.

    Raises:
        CommandError: one line for each value that is wrong.
    """
    from moesaic.usage.reading import BadSettings, read_settings

    settings: dict[str, ServiceSettings] = {}
    problems: dict[str, None] = {}  # in order, each once: workers of a kind have the same settings
    for service in services:
        try:
            settings[service.name] = read_settings(settings_model(service.role), service.flags)
        except BadSettings as error:
            problems |= dict.fromkeys(error.problems)
    if problems:
        raise CommandError("\n".join(problems), Exit.USAGE)
    return settings


def _check_names(arguments: Sequence[str], options: Sequence[Any]) -> None:
    """Refuse flags that are no options, and settings that cannot be given to the suite."""
    from moesaic.usage.nearest import proposal
    from moesaic.usage.variables import ENV_PREFIX

    takers = {name for each in options if not getattr(each, "is_flag", True) for name in each.opts}
    known = {name for each in options for name in (*each.opts, *each.secondary_opts)}
    others = {name: flag for flag, _ in _settings().values() for name in flag.names}
    for before, argument in pairwise(("", *arguments)):
        name = argument.partition("=")[0]
        if name in known or before in takers or not name.startswith("-"):
            continue
        flag = others.get(name)
        if flag is None or not (flag.secret or flag.field in ITS_OWN):
            where = "'moesaic up --help' and 'moesaic serve ROLE --help' list them"
            raise CommandError(f"{name}: unknown flag{proposal(name, known)} ({where})", Exit.USAGE)
        variable = f"{ENV_PREFIX}{flag.field.upper()}, which others cannot see"
        how = f"give it as {GIVEN_AS.get(flag.field, variable)}"
        if flag.field in ITS_OWN and flag.field not in GIVEN_AS:
            how = "the suite sets this itself"
        raise CommandError(f"{name}: {how}", Exit.USAGE)


def _typed(flag: "Flag", value: str | bool) -> str:
    """Write a flag with its value as one word of a command line."""
    if isinstance(value, str):
        return f"{flag.name}={value}"
    return flag.name if value else flag.off_name
