"""The load of all benchmarks: an open loop, which sends requests when they are due, without waiting for earlier ones.

All times of a request count from when it was due, not from when it was sent: a client or a server that is behind makes
no request look quicker. Answers are kept as they come and read after the measurement. A closed loop, which measures
capacities, sends by the same means.
"""

import asyncio
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from benchmarks.common.raw_http import Connection, encoded, request

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ANSWER_S = 300.0  # longest wait for a client
Body = Callable[[int], dict[str, Any]]  # by the number of the request
Headers = Callable[[int], Mapping[str, str]]


@dataclass
class TimedRequest:
    """One request and its answer; times are seconds from the start of the load.

    Attributes:
        number: number of the request, which determines its body.
        due_s: it arrived; latencies count from here.
        sent_s: time of sending, later than due if the client was late.
        status: HTTP status, 500 if an error ended a stream; 0 if the connection failed.
        parts: parts of the answer as they arrived, with their times, until they are read.
        end_s: end of the answer.
        token_times: time of each token, if the body asks for token ids.
        token_ids: tokens of the answer, likewise.
        cached_tokens: cached tokens of the prompt, if the answer reports its usage.
        mean_threshold: mean threshold that the answer reports; 1 is exact.
        degraded_share: likewise, of choices.
        complete: the answer has its end, and no error.
        right: the answer is the one meant, where the benchmark judges it.
    """

    number: int
    due_s: float
    sent_s: float = 0.0
    status: int = 0
    parts: list[tuple[float, bytes]] = field(default_factory=list)
    end_s: float = 0.0
    token_times: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    mean_threshold: float = 1.0
    degraded_share: float = 0.0
    complete: bool = False
    right: bool = False

    @property
    def was_shed(self) -> bool:
        """Refused, to be tried again later."""
        return self.status in (429, 503)

    @property
    def latency_s(self) -> float:
        """Seconds to the end; endless if there is no whole answer."""
        return self.end_s - self.due_s if self.complete else float("inf")

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token, or to the end of an empty answer; endless if there is no whole answer."""
        if not self.complete:
            return float("inf")
        return (self.token_times or [self.end_s])[0] - self.due_s

    @property
    def gaps_s(self) -> list[float]:
        """Seconds before each later token."""
        return [after - before for before, after in pairwise(self.token_times)]

    @property
    def tpot_s(self) -> float:
        """Mean seconds of a later token; none if there is no later one, endless if there is no answer."""
        if not self.complete:
            return float("inf")
        later = len(self.token_times) - 1
        return (self.token_times[-1] - self.token_times[0]) / later if later > 0 else 0.0

    def read(self) -> None:
        """Read the answer, streamed or not, from its parts."""
        rest = b""
        for at, part in self.parts:
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                if line == b"data: [DONE]":
                    self.complete = self.status == 200
                elif line.startswith(b"data: "):
                    self._take(json.loads(line[6:]), at)
        if self.status == 200 and rest.startswith(b"{"):
            self.complete = True
            self._take(json.loads(rest), self.end_s)
        self.parts = []

    def _take(self, event: dict[str, Any], at: float) -> None:
        if "error" in event:
            self.status = 500
            return
        for choice in event["choices"]:
            ids = choice.get("token_ids") or []
            self.token_ids += ids
            self.token_times += [at] * len(ids)
        details = (event.get("usage") or {}).get("prompt_tokens_details") or {}
        self.cached_tokens = details.get("cached_tokens") or self.cached_tokens
        quality = (event.get("moesaic") or {}).get("quality") or {}
        self.mean_threshold = quality.get("mean_threshold", self.mean_threshold)
        self.degraded_share = quality.get("degraded_share", self.degraded_share)


class LoadClient:
    """Sends requests to a gateway, on as many kept connections as there are requests in flight."""

    def __init__(self, port: int, route: str) -> None:
        self._port, self._route = port, route
        self._idle: list[Connection] = []
        self._started = time.perf_counter()

    @property
    def now_s(self) -> float:
        """Seconds since the start of the load."""
        return time.perf_counter() - self._started

    async def open(self, connections: int) -> None:
        """Open connections beforehand, which would else cost time of requests."""
        self._idle += [await Connection.open(self._port) for _ in range(connections)]

    async def open_loop(
        self,
        due: Sequence[float],
        body: Body,
        headers: Headers = lambda _: {},
        start_s: float = 0.0,
    ) -> list[TimedRequest]:
        """Send requests when they are due, and wait for all answers.

        Args:
            due: seconds, in order.
            body: returns the body of each request.
            headers: likewise.
            start_s: the time that it is now.

        Returns:
            The requests with their answers, read.
        """
        requests = [TimedRequest(number, at) for number, at in enumerate(due)]
        sent = [self._bytes(body(n), headers(n)) for n in range(len(requests))]
        self._started = time.perf_counter() - start_s
        async with asyncio.TaskGroup() as tasks:
            for each, content in zip(requests, sent, strict=True):
                if (wait_s := each.due_s - self.now_s) > 0:
                    await asyncio.sleep(wait_s)
                tasks.create_task(self._ask(each, content))
        return _read(requests)

    async def closed_loop(
        self, clients: int, body: Body, *, seconds: float = math.inf, count: int | None = None
    ) -> list[TimedRequest]:
        """Have clients ask one request after the other, each due when its client is free.

        Args:
            clients: clients that ask at the same time.
            body: returns the body of each request.
            seconds: after which none begins another.
            count: number of requests, which are made beforehand; None: as many as fit into the time.

        Returns:
            The requests with their answers, read.
        """
        made = [self._bytes(body(number), {}) for number in range(count or 0)]
        most = math.inf if count is None else count
        requests: list[TimedRequest] = []
        self._started = time.perf_counter()

        async def one_client() -> None:
            while self.now_s < seconds and (number := len(requests)) < most:
                requests.append(each := TimedRequest(number, self.now_s))
                await self._ask(each, made[number] if made else self._bytes(body(number), {}))

        async with asyncio.TaskGroup() as tasks:
            for _ in range(clients):
                tasks.create_task(one_client())
        return _read(requests)

    def close(self) -> None:
        """Hang up."""
        for connection in self._idle:
            connection.close()
        self._idle = []

    def _bytes(self, body: dict[str, Any], headers: Mapping[str, str]) -> bytes:
        return request(self._route, encoded(body), headers)

    async def _ask(self, each: TimedRequest, content: bytes) -> None:
        """Send one request, and keep the parts of its answer."""
        each.sent_s = self.now_s
        connection = None
        try:
            async with asyncio.timeout(ANSWER_S):
                connection = await self._connection()
                each.status = await connection.ask(content)
                while part := await connection.part():
                    each.parts.append((self.now_s, part))
            self._idle.append(connection)
        except (OSError, EOFError, TimeoutError):
            each.status = 0
            if connection is not None:
                connection.close()
        each.end_s = self.now_s

    async def _connection(self) -> Connection:
        """Take a connection that rests, or open one."""
        while self._idle:
            if not (connection := self._idle.pop()).is_over:
                return connection
        return await Connection.open(self._port)


def _read(requests: list[TimedRequest]) -> list[TimedRequest]:
    """Read all answers, once that no longer costs time that is measured."""
    for each in requests:
        each.read()
    return requests
