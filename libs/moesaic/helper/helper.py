"""Helper processes that answer questions within limits, started when needed and kept.

A question's verdict must not depend on what happened to a process before. A process that crashed, or
that ran out of memory after other questions, gets a successor, and the fresh one decides.

A process may end in the middle of a question. The signal and the processor time that it used tell why:

| End | Cause | Raised |
|---|---|---|
| SIGPROF, the limit of time used | the timer of ``serving`` | ``TooMuch("time")`` |
| no end; the answer says so | no more memory was given, or the answer is too long | ``TooMuch("memory")`` |
| SIGSEGV, SIGABRT and the like | the work crashed | ``TooMuch("crash")`` |
| all others | somebody else ended or stopped it | ``NotReady`` |

A parent cannot know who sent a signal. So one crash alone decides nothing.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import structlog

from moesaic.errors import NotReady
from moesaic.helper.limits import HEAD, Limits, TooMuch, decode, encode

LOOK_S = 0.25  # between two looks at a process that does not answer
# Looks, not seconds, are counted: if the whole machine stood still, the process had no time either.
MAX_LOOKS = 120
MAX_STOPPED_LOOKS = 2
RETRY_S = 1.0  # a new process starts faster
_CRASHES = {
    signal.SIGABRT,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGSEGV,
    signal.SIGSYS,
    signal.SIGTRAP,
}
# No secrets: a helper works on what nobody trusts.
_VARIABLES = {"HOME", "LANG", "LD_LIBRARY_PATH", "PATH", "TZ", "VIRTUAL_ENV"}
_LOST = "the helper process was ended or stopped from outside; a new one starts"

log = structlog.get_logger()


class HelperProcess:
    """A running process. One thread uses it at a time.

    Attributes:
        is_fresh: it has answered nothing yet.
    """

    def __init__(self, module: str, arguments: Sequence[str], limits: Limits) -> None:
        """Start ``python -m module``, which calls ``serving.serve``.

        Raises:
            NotReady: the system starts no process now.
        """
        self._module, self._limits = module, limits
        self.is_fresh, self._is_up, self._cpu_s = True, False, 0.0
        try:
            self._socket, theirs = socket.socketpair()
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", module, *arguments],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=_environment(),
                )
        except OSError as error:
            raise NotReady(f"no helper process can be started: {error.strerror}") from error
        self._socket.settimeout(LOOK_S)
        self.end = weakref.finalize(self, _end, self._process, self._socket)

    @property
    def is_alive(self) -> bool:
        """False if it has ended."""
        return self._process.poll() is None

    def ask(self, frame: bytes) -> Any:
        """Have a question answered; after any exception, the process must be ended.

        Raises:
            TooMuch: the question takes more than the limits allow.
            NotReady: the process was ended or stopped by somebody else.
        """
        try:
            if not self._is_up:
                self._receive()
                self._is_up = True
            left = memoryview(frame)
            while left:
                left = left[self._patiently(self._socket.send, left) :]
            told = self._receive()
        except (EOFError, OSError):
            raise self._cause_of_death() from None
        if "answer" not in told:
            raise TooMuch("memory")
        self.is_fresh = False
        return told["answer"]

    def _receive(self) -> dict[str, Any]:
        (length,) = HEAD.unpack(self._read(HEAD.size))
        if length > self._limits.answer_bytes:
            raise EOFError
        told: dict[str, Any] = decode(self._read(length))
        self._cpu_s = told["cpu_s"]
        return told

    def _read(self, length: int) -> bytearray:
        read = bytearray(length)
        left = memoryview(read)
        while left:
            count = self._patiently(self._socket.recv_into, left)
            if not count:
                raise EOFError
            left = left[count:]
        return read

    def _patiently(self, call: Callable[[memoryview], int], part: memoryview) -> int:
        """Send or receive a part, as long as the process can make progress."""
        stopped = 0
        for _ in range(MAX_LOOKS):
            with suppress(TimeoutError):
                return call(part)
            stopped = stopped + 1 if self._is_stopped() else 0
            if stopped == MAX_STOPPED_LOOKS:
                break
        raise EOFError

    def _is_stopped(self) -> bool:
        with suppress(OSError):
            status = Path(f"/proc/{self._process.pid}/stat").read_text(encoding="utf-8")
            return status.rpartition(")")[2].split()[0] in "tT"
        return False

    def _cause_of_death(self) -> TooMuch | NotReady:
        # Not by Popen, which would take the status; a process that is ending keeps its own cause.
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGKILL)
        try:
            _, status, used = os.wait4(self._process.pid, 0)
        except ChildProcessError:  # this process was told to leave its children alone
            return NotReady(_LOST, RETRY_S)
        code = self._process.returncode = os.waitstatus_to_exitcode(status)
        used_s = used.ru_utime + used.ru_stime - self._cpu_s
        log.warning("helper.ended", module=self._module, exit_code=code, cpu_s=round(used_s, 3))
        if self._is_up and code == -signal.SIGPROF and used_s > self._limits.cpu_s / 2:
            return TooMuch("time")
        if self._is_up and -code in _CRASHES:
            return TooMuch("crash")
        return NotReady(_LOST, RETRY_S)


def _environment() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if name in _VARIABLES or name.startswith(("LC_", "PYTHON"))
    }


def _end(process: "subprocess.Popen[bytes]", connection: socket.socket) -> None:
    connection.close()
    process.kill()
    process.wait()


class Helper:
    """Answers questions, by ``most`` processes at a time. Safe to use from several threads."""

    def __init__(
        self, module: str, arguments: Sequence[str], limits: Limits, *, most: int = 1
    ) -> None:
        """``module`` calls ``serving.serve`` when run. Nothing is started before the first question."""
        self._module, self._arguments, self._limits = module, arguments, limits
        self._places = threading.BoundedSemaphore(most)
        self._idle: list[HelperProcess] = []  # the last one used is the warmest, and the next

    def ask(self, question: Any) -> Any:
        """Have a question answered, both of which JSON can hold.

        Raises:
            TooMuch: the question takes more than the limits allow.
            NotReady: the process was ended or stopped from outside, or none can be started.
        """
        frame = encode(question)
        with self._places:
            process = self._taken()
            was_fresh = process.is_fresh
            try:
                return self._asked(process, frame)
            except TooMuch as verdict:
                if verdict.limit == "time" or (verdict.limit == "memory" and was_fresh):
                    raise
            return self._asked(self._started(), frame)

    def _asked(self, process: HelperProcess, frame: bytes) -> Any:
        try:
            answer = process.ask(frame)
        except BaseException:
            process.end()
            raise
        self._idle.append(process)
        return answer

    def _taken(self) -> HelperProcess:
        while self._idle:
            try:
                process = self._idle.pop()
            except IndexError:  # another thread was faster
                break
            if process.is_alive:
                return process
            process.end()
        return self._started()

    def _started(self) -> HelperProcess:
        return HelperProcess(self._module, self._arguments, self._limits)
