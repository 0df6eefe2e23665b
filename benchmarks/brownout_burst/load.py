"""The load: requests sent when they are due, whether or not earlier ones are answered, and what came of each."""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx

ROUTE = "/v1/chat/completions"
ANSWER_S = 300.0  # longest wait for a client
Body = Callable[[int], dict[str, Any]]  # by the number of the request


@dataclass
class BurstRequest:
    """One request and its answer; times are seconds from the start of the arm.

    Attributes:
        number: of the request, which says what was asked.
        due_s: it arrived; latencies count from here.
        sent_s: it was sent, later if the client was behind.
        status: of HTTP; 0 where the connection failed.
        parts: of the answer as they came, with their times.
        end_s: of the answer.
        token_times: of each token.
        token_ids: of the answer.
        mean_threshold: as the answer tells it; 1 is exact.
        degraded_share: likewise, of choices.
        complete: the answer has its end, and no error.
        right: the answer is the one meant.
    """

    number: int
    due_s: float
    sent_s: float = 0.0
    status: int = 0
    parts: list[tuple[float, bytes]] = field(default_factory=list)
    end_s: float = 0.0
    token_times: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    mean_threshold: float = 1.0
    degraded_share: float = 0.0
    complete: bool = False
    right: bool = False

    @property
    def was_shed(self) -> bool:
        """Refused, to be tried again later."""
        return self.status in (429, 503)

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
        """Read the answer from its parts."""
        rest = b""
        for at, part in self.parts:
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                if line == b"data: [DONE]":
                    self.complete = self.status == 200
                elif line.startswith(b"data: "):
                    self._take(json.loads(line[6:]), at)
        self.parts = []

    def _take(self, event: dict[str, Any], at: float) -> None:
        if "error" in event:
            self.status = 500
            return
        for choice in event["choices"]:
            ids = choice.get("token_ids") or []
            self.token_ids += ids
            self.token_times += [at] * len(ids)
        quality = (event.get("moesaic") or {}).get("quality") or {}
        self.mean_threshold = quality.get("mean_threshold", self.mean_threshold)
        self.degraded_share = quality.get("degraded_share", self.degraded_share)


class BurstClient:
    """Sends requests over REST, and measures from one start."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client, self._started = client, time.perf_counter()

    @property
    def now_s(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._started

    async def open_loop(self, due: Sequence[float], body: Body) -> list[BurstRequest]:
        """Send requests when they are due, and wait for all answers."""
        self._started = time.perf_counter()
        requests = [BurstRequest(number, at) for number, at in enumerate(due)]
        async with asyncio.TaskGroup() as tasks:
            for request in requests:
                if (wait_s := request.due_s - self.now_s) > 0:
                    await asyncio.sleep(wait_s)
                tasks.create_task(self.ask(request, body(request.number)))
        return requests

    async def closed_loop(self, clients: int, seconds: float, body: Body) -> list[BurstRequest]:
        """Have so many clients ask one request after the other for so long; return all with their answers."""
        self._started = time.perf_counter()
        requests: list[BurstRequest] = []

        async def one_client() -> None:
            while self.now_s < seconds:
                requests.append(request := BurstRequest(len(requests), self.now_s))
                await self.ask(request, body(request.number))

        async with asyncio.TaskGroup() as tasks:
            for _ in range(clients):
                tasks.create_task(one_client())
        return requests

    async def ask(self, request: BurstRequest, body: dict[str, Any]) -> None:
        """Send one request, and keep the parts of its answer."""
        request.sent_s = self.now_s
        try:
            async with self._client.stream("POST", ROUTE, json=body) as answer:
                request.status = answer.status_code
                async for part in answer.aiter_raw():
                    request.parts.append((self.now_s, part))
        except httpx.HTTPError:
            request.status = 0
        request.end_s = self.now_s


def rest_client(port: int) -> httpx.AsyncClient:
    """Make a client that opens as many connections as there are requests under way."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    return httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{port}", timeout=ANSWER_S, limits=limits, trust_env=False
    )


def read(requests: Sequence[BurstRequest]) -> None:
    """Read all answers from their parts, once that no longer costs time that is measured."""
    for request in requests:
        request.read()
