"""Output of commands: results to standard output, lines about the work to standard error."""

import contextlib
import json
import sys
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress


# Texts of others, such as a model's, must not steer the terminal.
_STEERING = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def harmless(text: str, stream: TextIO) -> str:
    """Leave control characters out of a text, if a terminal shows it."""
    return text.translate(_STEERING) if stream.isatty() else text


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
        table.add_row(*(Text(harmless(str(cell), sys.stdout)) for cell in row))
    # A file or a pipe gets lines of any length.
    Console(width=None if terminal else 400).print(table)


def print_entries(
    columns: Sequence[str], rows: Sequence[Sequence[object]], notes: Sequence[str]
) -> None:
    """Write rows with a note below each, for notes too long for a column.

    Args:
        columns: heads of the columns.
        rows: cells, as many as columns.
        notes: one for each row; empty: none.
    """
    import shutil
    import textwrap

    cells = [[str(cell) for cell in row] for row in (columns, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    width = max(40, shutil.get_terminal_size((120, 0)).columns - 1)
    for line, note in zip(cells, ("", *notes), strict=True):
        padded = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print(" " + "  ".join(padded).rstrip())
        if note:
            print(textwrap.fill(note, width, initial_indent=" " * 5, subsequent_indent=" " * 5))


def say(text: str) -> None:
    """Write one line about the work to standard error."""
    # The terminal may be gone; the work goes on.
    with contextlib.suppress(OSError):
        print(harmless(text, sys.stderr), file=sys.stderr, flush=True)


def say_at_time(text: str) -> None:
    """Write one line about the work to standard error, with the time of day."""
    say(f"{time.strftime('%H:%M:%S')} {text}")


def progress_bar(*, sizes: bool = False) -> "Progress":
    """Make a progress display on standard error; it stays hidden unless that is a terminal.

    Args:
        sizes: pieces are bytes, shown with their rate.
    """
    from rich import progress
    from rich.console import Console

    console, hidden = Console(stderr=True), not sys.stderr.isatty()
    amounts: list[progress.ProgressColumn] = [progress.MofNCompleteColumn()]
    if sizes:
        amounts = [progress.DownloadColumn(binary_units=True), progress.TransferSpeedColumn()]
    return progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        *amounts,
        progress.TimeRemainingColumn(),
        console=console,
        disable=hidden,
        transient=True,
    )
