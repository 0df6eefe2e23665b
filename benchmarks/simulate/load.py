"""The real load: requests of known lengths, sent when they are due, and the times of their first and last tokens."""

import asyncio
import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.common.raw_http import Connection, encoded
from moesaic.simulation.arrivals import ArrivalTrace

ROUTE = "/v1/completions"
FIRST_PLAIN_TOKEN, LAST_PLAIN_TOKEN = 300, 4095  # of the demo model: past special ones and bytes
TOKENS = re.compile(rb'"token_ids":\[([0-9, ]+)\]')


@dataclass
class TimedAnswer:
    """One request; times are seconds from the start of its load.

    Attributes:
        due_s: it is sent then, or a little later if the client is late.
        sent_s: it was sent.
        token_s: of each token.
        parts: of the answer as they came, until they are read.
    """

    prompt_tokens: int
    answer_tokens: int
    due_s: float
    sent_s: float = 0.0
    token_s: list[float] = field(default_factory=list)
    parts: list[tuple[float, bytes]] = field(default_factory=list)

    @property
    def begun_s(self) -> float:
        """Time of the first token."""
        return self.token_s[0]

    @property
    def ended_s(self) -> float:
        """Time of the last token."""
        return self.token_s[-1]

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token, from when the request was sent."""
        return self.begun_s - self.sent_s

    @property
    def tpot_s(self) -> float:
        """Mean seconds of a later token; there must be one."""
        return (self.ended_s - self.begun_s) / (self.answer_tokens - 1)

    def read(self) -> None:
        """Read the times from the parts of the answer.

        Raises:
            RuntimeError: it has not as many tokens as were asked for.
        """
        for at, part in self.parts:
            self.token_s += [at] * sum(ids.count(b",") + 1 for ids in TOKENS.findall(part))
        if len(self.token_s) != self.answer_tokens:
            raise RuntimeError(
                f"asked for {self.answer_tokens} tokens, got {len(self.token_s)}: {self.parts[-3:]}"
            )
        self.parts = []


class SimulateClient:
    """Sends requests to a gateway, on connections that stay open. Each prompt is drawn, so nothing is cached."""

    def __init__(self, port: int, seed: int) -> None:
        self._port, self._random = port, random.Random(seed)
        self._idle: list[Connection] = []

    async def open(self, connections: int) -> None:
        """Open connections beforehand, which would else cost time of requests."""
        self._idle += [await Connection.open(self._port) for _ in range(connections)]

    async def serve(self, trace: ArrivalTrace) -> list[TimedAnswer]:
        """Send the requests of a trace when they are due, whatever became of earlier ones."""
        answers = [
            TimedAnswer(prompt, answer, at)
            for at, prompt, answer in zip(
                trace.at_s.tolist(),
                trace.prompt_tokens.tolist(),
                trace.answer_tokens.tolist(),
                strict=True,
            )
        ]
        bodies = [self._body(answer) for answer in answers]
        started = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for answer, body in zip(answers, bodies, strict=True):
                if (wait_s := answer.due_s - (time.perf_counter() - started)) > 0:
                    await asyncio.sleep(wait_s)
                tasks.create_task(self._ask(answer, body, started))
        read(answers)
        return answers

    async def one_by_one(self, lengths: Sequence[tuple[int, int]]) -> list[TimedAnswer]:
        """Send requests of (prompt, answer) tokens one after the other."""
        found = []
        for prompt, answer in lengths:
            found += await self.together([(prompt, answer)])
        return found

    async def together(self, lengths: Sequence[tuple[int, int]]) -> list[TimedAnswer]:
        """Send requests of (prompt, answer) tokens at once."""
        answers = [TimedAnswer(prompt, answer, 0.0) for prompt, answer in lengths]
        bodies = [self._body(answer) for answer in answers]
        started = time.perf_counter()
        await asyncio.gather(*map(self._ask, answers, bodies, [started] * len(answers)))
        read(answers)
        return answers

    def close(self) -> None:
        """Hang up."""
        for connection in self._idle:
            connection.close()

    def _body(self, answer: TimedAnswer) -> bytes:
        prompt = self._random.choices(
            range(FIRST_PLAIN_TOKEN, LAST_PLAIN_TOKEN), k=answer.prompt_tokens
        )
        return encoded(
            {
                "prompt": prompt,
                "max_tokens": answer.answer_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "return_token_ids": True,
            }
        )

    async def _ask(self, answer: TimedAnswer, body: bytes, started: float) -> None:
        self._idle = [connection for connection in self._idle if not connection.is_over]
        connection = self._idle.pop() if self._idle else await Connection.open(self._port)
        answer.sent_s = time.perf_counter() - started
        connection.send(ROUTE, body)
        if (status := await connection.begun()) != 200:
            raise RuntimeError(f"a request was answered with {status}")
        while part := await connection.chunk():
            answer.parts.append((time.perf_counter() - started, part))
        self._idle.append(connection)


def read(answers: Sequence[TimedAnswer]) -> None:
    """Read all answers, once that no longer costs time that is measured."""
    for answer in answers:
        answer.read()
