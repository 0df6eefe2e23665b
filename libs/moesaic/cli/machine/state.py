"""The state file of the suite that runs in this directory, if any.

A suite is identified by its process id together with that process's start time, so that a reused id
is not mistaken for it.
"""

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec

from moesaic.cli.machine.disk import check_room
from moesaic.cli.machine.links.cables import CableNetwork
from moesaic.cli.terminal.outcome import CommandError, Exit

RUN_DIRECTORY = Path("run")
_PRIVATE_DIRECTORY, _PRIVATE_FILE = 0o700, 0o600
_OTHERS = 0o077  # what group and others may do


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
    model: str  # its directory
    model_name: str = ""  # in the API
    processes: list[ProcessState]
    network: CableNetwork | None = None  # of agents with links between them

    @property
    def alive(self) -> bool:
        """True while the supervisor that wrote this runs."""
        return process_start_time(self.pid) == self.start_time


def process_start_time(pid: int) -> int | None:
    """Look up the start of a process, in clock ticks since boot; None if it is gone or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command's name, which stands before, may hold spaces and parentheses.
    fields = stat.rpartition(")")[2].split()
    state, start_time = fields[0], int(fields[19])
    return None if state in "ZX" else start_time


class StateFile:
    """``moesaic.json`` in a run directory."""

    def __init__(self, directory: Path = RUN_DIRECTORY) -> None:
        self.directory = directory
        self.path = directory / "moesaic.json"
        self.secret_path = directory / "secret"
        self._lock_path = directory / "lock"

    def make_directory(self) -> None:
        """Make the run directory unless it is there, readable by this user only.

        Raises:
            CommandError: it cannot be made, its disk is full, it is another user's, or it is open to
                others and holds other files than a suite's.
        """
        check_room(self.directory)
        try:
            self.directory.mkdir(mode=_PRIVATE_DIRECTORY, parents=True, exist_ok=True)
            self._keep_others_out()
        except OSError as error:
            taken = isinstance(error, (FileExistsError, NotADirectoryError))
            fix = "move the file of that name" if taken else "start it from another directory"
            raise CommandError(
                f"{self.directory.absolute()}: cannot create this directory for the suite's logs "
                f"({error.strerror}); {fix}",
                Exit.USAGE,
            ) from error

    def _keep_others_out(self) -> None:
        if not stat.S_IMODE(self.directory.stat().st_mode) & _OTHERS:
            return
        if not self._lock_path.is_file() and any(self.directory.iterdir()):
            # Such as /run, for a suite started in the root directory: closing it would stop the machine.
            raise CommandError(
                f"{self.directory.absolute()}: is open to others and holds files of no suite; "
                "start the suite from another directory, or 'chmod 700' this one if it is for suites",
                Exit.USAGE,
            )
        try:
            self.directory.chmod(_PRIVATE_DIRECTORY)
        except PermissionError as error:
            raise CommandError(
                f"{self.directory}: belongs to another user and is open to others, but the suite keeps "
                "its secret there; remove it, or start the suite from another directory",
                Exit.USAGE,
            ) from error

    @contextmanager
    def needed(self) -> Iterator[None]:
        """Wrap writing that must succeed before any process is started.

        Raises:
            CommandError: instead of an ``OSError``.
        """
        try:
            yield
        except OSError as error:
            raise CommandError(
                f"{self.directory.absolute()}: cannot write the suite's logs to this directory "
                f"({error.strerror}); free space, or start the suite from another directory",
                Exit.USAGE,
            ) from error

    def running(self) -> SuiteState | None:
        """Read the state of the suite that runs now.

        Returns:
            None if there is no suite, only the file of a dead one, or it is another user's.
        """
        try:
            state = msgspec.json.decode(self.path.read_bytes(), type=SuiteState)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return None
        except (msgspec.MsgspecError, UnicodeDecodeError):
            # A damaged file says nothing about a running suite.
            return None
        return state if state.alive else None

    def write(self, state: SuiteState) -> None:
        """Replace the file at once: a reader sees either the old or the new content."""
        new = self.path.with_suffix(".new")
        new.write_bytes(msgspec.json.format(msgspec.json.encode(state)) + b"\n")
        os.replace(new, self.path)

    def write_secret(self, secret: str) -> None:
        """Store the cluster's secret for commands in this directory."""
        new = self.secret_path.with_suffix(".new")
        # Of a start that was cut short.
        new.unlink(missing_ok=True)
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _PRIVATE_FILE)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(f"{secret}\n")
        os.replace(new, self.secret_path)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Claim the directory for one suite; its files are removed at the end.

        Raises:
            CommandError: a suite runs here already, or the directory cannot be made.
        """
        self.make_directory()
        with self.needed():
            lock = self._lock_path.open("w")
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
                self.secret_path.unlink(missing_ok=True)
