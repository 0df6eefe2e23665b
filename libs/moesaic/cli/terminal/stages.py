"""Progress of work in stages: bars in a terminal, and a line now and then elsewhere."""

import sys
import time
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING

from moesaic.cli.terminal.console import progress_bar, say_at_time

if TYPE_CHECKING:
    from rich.progress import TaskID

_GIB = 1 << 30
QUIET_S = 15.0  # between lines within a stage


class Stages:
    """The progress display of one command; a context manager."""

    def __init__(self, *, sizes: bool = False) -> None:
        """Begin with no stage; ``sizes``: pieces are bytes. Any thread may call its methods."""
        self._bar, self._tasks = progress_bar(sizes=sizes), dict[str, "TaskID"]()
        self._sizes = sizes
        self._began: dict[str, tuple[float, int]] = {}
        self._said_s = 0.0

    def __enter__(self) -> "Stages":
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def show(self, stage: str, done: int, total: int, note: str = "") -> None:
        """Show that ``done`` of ``total`` pieces of a stage are done.

        Args:
            stage: its name; a new one begins a new stage.
            done: pieces, this one included.
            total: pieces of the stage.
            note: more on the last piece.
        """
        now = time.monotonic()
        new = stage not in self._began
        if new:
            self._began[stage] = now, done
            self._tasks[stage] = self._bar.add_task(stage, total=total, completed=done)
        self._bar.update(self._tasks[stage], completed=done, total=total)
        if sys.stderr.isatty():
            return
        if new or done == total or now - self._said_s >= QUIET_S:
            self._said_s = now
            amounts = f"{done} of {total}"
            if self._sizes:
                amounts = f"{done / _GIB:.2f} of {total / _GIB:.2f} GiB"
            parts = [f"{stage}: {amounts}", note, *self._speed(stage, done, total)]
            say_at_time(", ".join(filter(None, parts)))

    def _speed(self, stage: str, done: int, total: int) -> Iterator[str]:
        """Write the rate of bytes, and the time that a stage still takes; nothing at its ends."""
        began_s, before = self._began[stage]
        if done <= before or done == total:
            return
        rate = (done - before) / (time.monotonic() - began_s)
        if self._sizes:
            yield f"{rate / 1e6:.1f} MB/s"
        minutes, seconds = divmod(round((total - done) / rate), 60)
        yield f"about {minutes} min {seconds:02d} s left"
