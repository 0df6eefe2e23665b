"""Settings of the services as flags of ``moesaic up``."""

from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from moesaic.cli.suite.processes import Service, Setting, Topology, module_of, roles_of
from moesaic.cli.terminal.outcome import CommandError, Exit

if TYPE_CHECKING:
    from moesaic.settings import ServiceSettings
    from moesaic.usage.flags import Flag

# Settings that the suite chooses for each process, or takes under another name.
ITS_OWN = {
    *("worker_id", "host", "control_host", "advertise_host", "admin_port", "metrics_port"),
    *("data_host", "data_port", "weights_port", "grace_s", "threads", "dispatch", "share"),
    *("memory_bytes", "site", "standby"),
}
GIVEN_AS = {
    "memory_bytes": "--memory",
    "standby": "--standby-attention or --standby-experts",
}


def settings_model(role: str) -> type["ServiceSettings"]:
    """Import the settings of a service when they are needed, as no room may know the services."""
    module = import_module(f"{module_of(role)}.settings")
    name = role.title().replace("-", "")
    found: type[ServiceSettings] = getattr(module, f"{name}Settings")
    return found


def service_flags(
    arguments: Sequence[str], own: Iterable[str], topology: Topology
) -> tuple[Setting, ...]:
    """Read the services' settings among the flags of ``moesaic up``.

    Args:
        arguments: of the command line, besides its own flags.
        own: its own flags, for proposals.
        topology: of the suite.

    Returns:
        The settings, each with the services that have it.

    Raises:
        CommandError: a flag is no setting, or one that cannot be given to the suite.
    """
    from moesaic.usage.flags import WrongFlag, read_flags
    from moesaic.usage.reading import flags_in

    if not arguments:
        return ()
    flags: dict[str, Flag] = {}
    roles: dict[str, set[str]] = {}
    for role in roles_of(topology):
        for flag in flags_in(settings_model(role)):
            flags.setdefault(flag.field, flag)
            roles.setdefault(flag.field, set()).add(role)
    _check_names(arguments, flags, own)
    try:
        given = read_flags(list(flags.values()), arguments)
    except WrongFlag as error:
        raise CommandError(str(error), Exit.USAGE) from error
    return tuple(
        Setting(_typed(flags[field], value), frozenset(roles[field]))
        for field, value in given.items()
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


def _check_names(arguments: Sequence[str], flags: Mapping[str, "Flag"], own: Iterable[str]) -> None:
    """Refuse flags that are no settings, or cannot be given to the suite."""
    from moesaic.usage.nearest import proposal
    from moesaic.usage.variables import ENV_PREFIX

    known = {name: flag for flag in flags.values() for name in flag.names}
    settable = {name for name, flag in known.items() if flag.field not in ITS_OWN}
    for argument in arguments:
        name = argument.partition("=")[0]
        flag = known.get(name)
        if flag is None and name.startswith("-"):
            meant = proposal(name, {*settable, *own})
            where = "'moesaic up --help' and 'moesaic serve ROLE --help' list them"
            raise CommandError(f"{name}: there is no such flag{meant} ({where})", Exit.USAGE)
        if flag is not None and flag.field in GIVEN_AS:
            raise CommandError(f"{name}: give it as {GIVEN_AS[flag.field]}", Exit.USAGE)
        if flag is not None and flag.field in ITS_OWN:
            raise CommandError(f"{name}: the suite sets this itself", Exit.USAGE)
        if flag is not None and flag.secret:
            variable = f"{ENV_PREFIX}{flag.field.upper()}"
            raise CommandError(
                f"{name}: give it as {variable}, which others cannot see", Exit.USAGE
            )


def _typed(flag: "Flag", value: str | bool) -> str:
    """Write a flag with its value as one word of a command line."""
    if isinstance(value, str):
        return f"{flag.name}={value}"
    return flag.name if value else flag.off_name
