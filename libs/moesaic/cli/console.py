"""Results go to standard output, everything said about the work to standard error."""

import contextlib
import json
import sys
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress


def print_json(value: Any) -> None:
    """Write one JSON value to standard output: indented for people, on one line for programs."""
    print(
        json.dumps(value, indent=2 if sys.stdout.isatty() else None, ensure_ascii=False), flush=True
    )


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str = "") -> None:
    """Write a table to standard output, with colour only where a terminal can show it."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    terminal = sys.stdout.isatty()
    table = Table(
        title=title or None, title_justify="left", box=box.SIMPLE_HEAD if terminal else box.ASCII2
    )
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    # Lines that a file or a pipe gets are as long as they need to be.
    Console(width=None if terminal else 400).print(table)


def say(text: str) -> None:
    """Write one line about the work to standard error."""
    with contextlib.suppress(OSError):  # the terminal may be gone; the work goes on
        print(text, file=sys.stderr, flush=True)


def say_at_time(text: str) -> None:
    """Write one line about the work to standard error, with the time of day."""
    say(f"{time.strftime('%H:%M:%S')} {text}")


def progress_bar() -> "Progress":
    """A progress display on standard error; it shows nothing unless that is a terminal."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    return Progress(
        *columns, console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True
    )
