"""Progress of work in stages: bars in a terminal, and a line now and then elsewhere."""

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

from moesaic.cli.terminal.console import progress_bar, say_at_time

if TYPE_CHECKING:
    from rich.progress import TaskID

QUIET_S = 15.0  # between lines within a stage


class Stages:
    """The progress display of one command; a context manager."""

    def __init__(self) -> None:
        """Begin with no stage."""
        self._bar, self._tasks = progress_bar(), dict[str, "TaskID"]()
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
        self._bar.update(self._tasks[stage], completed=done)
        if sys.stderr.isatty():
            return
        if new or done == total or now - self._said_s >= QUIET_S:
            self._said_s = now
            parts = [f"{stage}: {done} of {total}", note, _left(*self._began[stage], done, total)]
            say_at_time(", ".join(filter(None, parts)))


def _left(began_s: float, done_before: int, done: int, total: int) -> str:
    """Estimate the time that a stage still takes; empty at its ends."""
    if done <= done_before or done == total:
        return ""
    left_s = (time.monotonic() - began_s) * (total - done) / (done - done_before)
    minutes, seconds = divmod(round(left_s), 60)
    return f"about {minutes} min {seconds:02d} s left"
