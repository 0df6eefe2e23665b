"""Help about a service's flags, grouped, in the style of the ``moesaic`` command.

It needs only the flags, since the libraries of a service take seconds to load. Without rich, as in
the containers of services, it is plain text.
"""

import shutil
import textwrap
from collections.abc import Sequence

from moesaic.usage.flags import Flag

HELP = Flag(
    field="help",
    group="",
    description="show this message and exit",
    form="",
    bounds="",
    default="",
    required=False,
    secret=False,
    on=False,
)
SOURCES = (
    "A flag such as --log-level comes before the variable MOESAIC_LOG_LEVEL, and that before a file "
    "moesaic_log_level in /run/secrets or the directory MOESAIC_SECRETS_DIR."
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
    shown[-1][1].append(HELP)
    try:
        import rich  # noqa: F401  # only whether it is there
    except ImportError:
        _print_plain(program, about, shown)
    else:
        _print_rich(program, about, shown)


def _print_rich(program: str, about: str, groups: Sequence[tuple[str, list[Flag]]]) -> None:
    from rich.console import Console
    from rich.padding import Padding
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    console.print()
    usage = Text.assemble(" ", ("Usage: ", "yellow"), (program, "bold"), " [OPTIONS]")
    console.print(usage)
    console.print()
    console.print(Padding(f"{about}\n\n[dim]{SOURCES}[/]", (0, 1)))
    console.print()
    # One width for all groups, so that their columns stand below each other.
    width = max(len(_names(flag)) for _, members in groups for flag in members)
    for title, members in groups:
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1), expand=True)
        table.add_column(style="bold cyan", no_wrap=True, min_width=width)
        table.add_column(ratio=1, overflow="fold")
        for flag in members:
            text = Text.assemble(
                (f"{_form(flag)} " if flag.form else "", "bold yellow"), flag.description
            )
            text.append(f" {_default(flag)}" if _default(flag) else "", "dim")
            text.append(" [required]" if flag.required else "", "dim red")
            table.add_row(Text(_names(flag)), text)
        console.print(Panel(table, title=title, title_align="left", border_style="dim"))


def _print_plain(program: str, about: str, groups: Sequence[tuple[str, list[Flag]]]) -> None:
    width = max(40, shutil.get_terminal_size((100, 0)).columns - 1)
    print(f"Usage: {program} [OPTIONS]\n\n{about}\n")
    print(textwrap.fill(SOURCES, width))
    for title, members in groups:
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
