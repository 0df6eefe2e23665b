"""Progress of bytes that come: a bar with rate and time left in a terminal, and a line now and then elsewhere."""

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

from moesaic.cli.terminal.console import say_at_time

if TYPE_CHECKING:
    from rich.progress import Progress

QUIET_S = 15.0  # between lines
_GIB = 1 << 30


def byte_bars() -> "Progress":
    """Make bars of bytes on standard error, with rate and time left; hidden where that is no terminal."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    console, hidden = Console(stderr=True), not sys.stderr.isatty()
    return Progress(*columns, console=console, disable=hidden, transient=True)


class Transfer:
    """The display of one transfer; a context manager. Its methods may be called from any thread."""

    def __init__(self, title: str) -> None:
        """Show nothing until bytes come."""
        self._title, self._bar = title, byte_bars()
        self._task = self._bar.add_task(title, total=None, visible=False)
        self._began_s, self._before, self._said_s = 0.0, 0, 0.0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def show(self, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` bytes have come."""
        now_s = time.monotonic()
        if not self._began_s:
            self._began_s, self._before = now_s, done
        self._bar.update(self._task, completed=done, total=total, visible=True)
        if sys.stderr.isatty() or (now_s - self._said_s < QUIET_S and done < total):
            return
        self._said_s = now_s
        say_at_time(f"{self._title}: {self._figures(now_s, done, total)}")

    def _figures(self, now_s: float, done: int, total: int) -> str:
        figures = f"{done / _GIB:.2f} of {total / _GIB:.2f} GiB"
        if done == total or done <= self._before:
            return figures
        rate = (done - self._before) / (now_s - self._began_s)
        minutes, seconds = divmod(round((total - done) / rate), 60)
        return f"{figures}, {rate / 1e6:.1f} MB/s, about {minutes} min {seconds:02d} s left"
