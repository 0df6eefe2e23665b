"""The state file: what suite runs in this directory, if any.

A suite is known by its process id together with that process's start time, so that a reused id is
not taken for it.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec

from moesaic.cli.outcome import CommandError, Exit

RUN_DIRECTORY = Path("run")


class ProcessState(msgspec.Struct, kw_only=True):
    """One process of a suite."""

    name: str
    role: str
    pid: int = 0  # 0: not running now
    admin_address: str = ""  # gRPC, host:port; empty: none
    metrics_address: str = ""  # HTTP, host:port; empty: none
    log: str = ""
    restarts: int = 0


class SuiteState(msgspec.Struct, kw_only=True):
    """A suite as its supervisor last wrote it."""

    pid: int
    start_time: int  # of the supervisor, in clock ticks since boot
    state: Literal["starting", "ready", "stopping"]
    url: str
    topology: str
    model: str
    processes: list[ProcessState]

    @property
    def alive(self) -> bool:
        """Whether the supervisor that wrote this still runs."""
        return process_start_time(self.pid) == self.start_time


def process_start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if it is gone or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[
        2
    ].split()  # the command's name, before, may hold spaces and parentheses
    state, start_time = fields[0], int(fields[19])
    return None if state in "ZX" else start_time


class StateFile:
    """``moesaic.json`` in a run directory."""

    def __init__(self, directory: Path = RUN_DIRECTORY) -> None:
        self.directory = directory
        self.path = directory / "moesaic.json"

    def make_directory(self) -> None:
        """Make the run directory unless it is there.

        Raises:
            CommandError: it cannot be made.
        """
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CommandError(
                f"{self.directory}: the suite keeps its logs there, but it cannot be made a "
                f"directory ({error.strerror}); move what is in its place",
                Exit.USAGE,
            ) from error

    @contextmanager
    def needed(self) -> Iterator[None]:
        """For what must be written before anything is started.

        Raises:
            CommandError: instead of an ``OSError``.
        """
        try:
            yield
        except OSError as error:
            raise CommandError(
                f"{self.directory}: the suite keeps its logs there, but it cannot be written "
                f"({error.strerror}); make room, or start it from another directory",
                Exit.USAGE,
            ) from error

    def running(self) -> SuiteState | None:
        """The suite that runs now; None if there is none, or only the file of one that died."""
        try:
            state = msgspec.json.decode(self.path.read_bytes(), type=SuiteState)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return None  # a damaged file says nothing about a running suite
        return state if state.alive else None

    def write(self, state: SuiteState) -> None:
        """Replace the file; a reader sees the old or the new content, never half of one."""
        new = self.path.with_suffix(".new")
        new.write_bytes(msgspec.json.format(msgspec.json.encode(state)) + b"\n")
        os.replace(new, self.path)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Claim the directory for one suite; the file goes away at the end.

        Raises:
            CommandError: a suite runs here already, or there can be no such directory.
        """
        self.make_directory()
        with self.needed():
            lock = (self.directory / "lock").open("w")
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                running = self.running()
                where = f" at {running.url} (pid {running.pid})" if running else ""
                raise CommandError(
                    f"a suite already runs in this directory{where}: stop it with 'moesaic down'"
                ) from None
            try:
                yield
            finally:
                self.path.unlink(missing_ok=True)
