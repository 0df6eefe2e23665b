"""One child process: it writes to its own log file and dies with its parent."""

import asyncio
import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from moesaic.cluster.parents import die_with


@contextlib.contextmanager
def _appending(log: Path) -> Iterator[BinaryIO]:
    with contextlib.ExitStack() as opened:
        try:
            file = opened.enter_context(log.open("ab"))
        except OSError:
            file = opened.enter_context(Path(os.devnull).open("ab"))
        yield file


class Child:
    """A running child process, in a session of its own: Ctrl-C reaches only the supervisor."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._started = time.monotonic()
        self.pid = process.pid

    @classmethod
    async def start(
        cls, command: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> "Child":
        """Start ``command`` with standard output and error appended to ``log``.

        Where the log cannot be opened, as on a full disk, they are lost.
        """
        with _appending(log) as output:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(environment),
                start_new_session=True,
                preexec_fn=die_with(os.getpid()),
            )
        return cls(process)

    @property
    def running(self) -> bool:
        """True until it has exited."""
        return self._process.returncode is None

    @property
    def ran_s(self) -> float:
        """Seconds since its start."""
        return time.monotonic() - self._started

    async def wait(self) -> int:
        """Wait for its end.

        Returns:
            The exit status; if negative, the signal that killed it.
        """
        return await self._process.wait()

    async def stop(self, grace_s: float) -> None:
        """Ask it to finish; kill its process group if it still runs after ``grace_s``."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            async with asyncio.timeout(grace_s):
                await self.wait()
        except TimeoutError:
            self.kill()
            await self.wait()

    def kill(self) -> None:
        """End it and the processes it started, at once."""
        # Else its id may be another process's by now.
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)


def last_lines(log: Path, count: int = 12) -> list[str]:
    """Read the last lines of a log file; none if there is no file."""
    try:
        with log.open(encoding="utf-8", errors="replace") as lines:
            return [line.rstrip("\n") for line in deque(lines, maxlen=count)]
    except FileNotFoundError:
        return []
