"""Asks the solver's process, and does not wait longer than was agreed."""

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import msgspec
import structlog

from moesaic.errors import DeadlineExceeded, NotReady
from services.scheduler.solver import LENGTH, READY, Answer, Failed, Replay, Solve, answers

log = structlog.get_logger()

COMMAND = (sys.executable, "-m", "services.scheduler.solver")
START_S = 30.0  # of a Python with numpy on a machine that does a lot else
LIMIT_S = 2.0  # of one question
MAX_ANSWER_BYTES = 64 << 20


class Solver:
    """A running process; it is ended with the block, or with the first question that fails."""

    def __init__(self, process: asyncio.subprocess.Process, limit_s: float) -> None:
        self._process, self._limit_s = process, limit_s

    async def ask(self, question: Solve | Replay) -> Answer:
        """The answer to one question.

        Raises:
            DeadlineExceeded: there was none in time; the process is no more.
            NotReady: the process ended, or what it said is no answer.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        payload = msgspec.msgpack.encode(question)
        try:
            async with asyncio.timeout(self._limit_s):
                self._process.stdin.write(LENGTH.pack(len(payload)) + payload)
                await self._process.stdin.drain()
                size = LENGTH.unpack(await self._process.stdout.readexactly(LENGTH.size))[0]
                if size > MAX_ANSWER_BYTES:
                    raise ValueError(f"{size} bytes")
                answer = answers.decode(await self._process.stdout.readexactly(size))
        except TimeoutError:
            self.kill()
            raise DeadlineExceeded("the solver", self._limit_s * 1e3) from None
        except (OSError, EOFError, ValueError, msgspec.DecodeError) as error:
            self.kill()
            raise NotReady(f"the solver gave no answer: {error!r}") from error
        if isinstance(answer, Failed):
            raise NotReady(f"the solver found nothing: {answer.cause}")
        return answer

    def kill(self) -> None:
        """End it at once."""
        with suppress(ProcessLookupError):
            self._process.kill()


@asynccontextmanager
async def solver(
    command: Sequence[str] = COMMAND, limit_s: float = LIMIT_S
) -> AsyncIterator[Solver]:
    """A process of its own for the length of the block.

    Raises:
        NotReady: it does not start.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
    except OSError as error:
        raise NotReady(f"the solver does not start: {error}") from error
    running = Solver(process, limit_s)
    try:
        assert process.stdout is not None
        try:
            async with asyncio.timeout(START_S):
                if await process.stdout.read(len(READY)) != READY:
                    raise NotReady("the solver does not start")
        except TimeoutError:
            raise NotReady(f"the solver does not start within {START_S:g} s") from None
        yield running
    finally:
        running.kill()
        await process.wait()
