"""Questions to the solver's process, each with a time limit."""

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import msgspec

from moesaic.errors import DeadlineExceeded, NotReady
from moesaic.services.scheduler.planning.messages import (
    LENGTH,
    READY,
    Answer,
    Failed,
    Question,
    answers,
)

COMMAND = (sys.executable, "-m", "moesaic.services.scheduler.planning.solver")
START_S = 30.0  # of a Python with numpy on a machine that does a lot else
LIMIT_S = 20.0  # of one question, at the lowest priority; of the processor's time it has less (``solver``)
MAX_ANSWER_BYTES = 64 << 20


class Solver:
    """Asks a process that it starts with a question, and anew after a question that failed."""

    def __init__(self, command: Sequence[str], limit_s: float) -> None:
        self._command, self._limit_s = command, limit_s
        self._process: asyncio.subprocess.Process | None = None

    async def ask(self, question: Question) -> Answer:
        """Ask one question.

        Raises:
            DeadlineExceeded: there was none in time.
            NotReady: the process did not start, ended, or gave no proper answer.
        """
        process = self._process or await self._start()
        try:
            async with asyncio.timeout(self._limit_s):
                answer = await _exchanged(process, msgspec.msgpack.encode(question))
        except TimeoutError:
            await self.end()
            raise DeadlineExceeded("the solver", self._limit_s * 1e3) from None
        except (OSError, EOFError, ValueError, msgspec.DecodeError) as error:
            await self.end()
            raise NotReady(f"the solver gave no answer: {error!r}") from error
        if isinstance(answer, Failed):
            raise NotReady(f"the solver found nothing: {answer.cause}")
        return answer

    async def end(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _start(self) -> asyncio.subprocess.Process:
        try:
            process = self._process = await asyncio.create_subprocess_exec(
                *self._command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
            )
        except OSError as error:
            raise NotReady(f"the solver does not start: {error}") from error
        assert process.stdout is not None
        said = b""
        with suppress(TimeoutError):
            async with asyncio.timeout(START_S):
                said = await process.stdout.read(len(READY))
        if said != READY:
            await self.end()
            raise NotReady("the solver does not start")
        return process


@asynccontextmanager
async def solver(
    command: Sequence[str] = COMMAND, limit_s: float = LIMIT_S
) -> AsyncIterator[Solver]:
    """A solver for the length of the block."""
    asked = Solver(command, limit_s)
    try:
        yield asked
    finally:
        await asked.end()


async def _exchanged(process: asyncio.subprocess.Process, payload: bytes) -> Answer:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(LENGTH.pack(len(payload)) + payload)
    await process.stdin.drain()
    size = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))[0]
    if size > MAX_ANSWER_BYTES:
        raise ValueError(f"an answer of {size} bytes")
    return answers.decode(await process.stdout.readexactly(size))
