"""Help about a service's flags, grouped: plain text, as the containers of services have no rich.

It needs only the flags, since the libraries of a service take seconds to load.
"""

import shutil
import textwrap
from collections.abc import Sequence

from moesaic.usage.config_file import CONFIG
from moesaic.usage.flags import MODEL, Flag

HELP = Flag(field="help", group="", description="show this message and exit")
SOURCES = (
    "A flag such as --log-level overrides the variable MOESAIC_LOG_LEVEL. The variable overrides a file "
    "moesaic_log_level in /run/secrets or the directory MOESAIC_SECRETS_DIR. The file of --config is last."
)


def print_help(program: str, about: str, flags: Sequence[Flag]) -> None:
    """Write the help to standard output.

    Args:
        program: its name as called.
        about: one line about it.
        flags: group by group.
    """
    groups: dict[str, list[Flag]] = {}
    for flag in flags:
        groups.setdefault(flag.group, []).append(flag)
    shown = list(groups.items())
    shown[-1][1].extend((CONFIG, HELP))
    width = max(40, shutil.get_terminal_size((100, 0)).columns - 1)
    model = "[MODEL] " if any(flag.name == MODEL for flag in flags) else ""
    print(f"Usage: {program} {model}[OPTIONS]\n\n{about}\n")
    print(textwrap.fill(SOURCES, width))
    for title, members in shown:
        print(f"\n{title}:")
        for flag in members:
            required = "[required]" if flag.required else ""
            parts = (_form(flag), flag.description, _default(flag), required)
            print(f"  {_names(flag)}")
            indent = " " * 6
            text = " ".join(part for part in parts if part)
            print(textwrap.fill(text, width, initial_indent=indent, subsequent_indent=indent))


def _names(flag: Flag) -> str:
    return flag.name if flag is HELP or not flag.off_name else f"--[no-]{flag.name[2:]}"


def _form(flag: Flag) -> str:
    return f"{flag.form} [{flag.bounds}]" if flag.bounds else flag.form


def _default(flag: Flag) -> str:
    if flag.on:
        return "[default: on]"
    return f"[default: {flag.default}]" if flag.default else ""
