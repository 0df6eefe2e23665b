"""The load: requests of servers' users over REST, sent when they are due, and what became of them."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from benchmarks.common.suite import DEMO
from benchmarks.edge.arrivals import EdgeArrival

ANSWER_S = 120.0  # longest wait for an answer
PromptOf = Callable[[str, int], str]  # by the task and the number


@dataclass(frozen=True)
class EdgeAnswer:
    """One request and what became of it; times are seconds from the start of its stretch.

    Attributes:
        arrival: the request.
        end_s: when its client had the whole answer.
        tokens: of the prompt and of the answer; 0: it failed.
        degraded_share: of its choices of experts, those that others served.
        failure: what went wrong; empty: nothing.
    """

    arrival: EdgeArrival
    end_s: float
    tokens: int = 0
    degraded_share: float = 0.0
    failure: str = ""

    @property
    def latency_s(self) -> float:
        """Seconds from when it was due."""
        return self.end_s - self.arrival.due_s


class EdgeClients:
    """The users of all servers."""

    def __init__(self, client: httpx.AsyncClient, max_tokens: int) -> None:
        self._client, self._max_tokens = client, max_tokens

    async def ask_all(
        self, due: Sequence[EdgeArrival], prompt: PromptOf, salt: str, start_s: float = 0.0
    ) -> list[EdgeAnswer]:
        """Send requests when they are due, and wait for all answers.

        Args:
            due: in the order of time.
            prompt: what is asked.
            salt: no KV is shared with stretches of another one.
            start_s: the time that it is now.
        """
        started, tasks = time.perf_counter() - start_s, []
        async with asyncio.TaskGroup() as group:
            for arrival in due:
                wait_s = arrival.due_s - (time.perf_counter() - started)
                await asyncio.sleep(max(0.0, wait_s))
                body = self._body(arrival, prompt, salt)
                tasks.append(group.create_task(self._ask(arrival, body, started)))
        return [task.result() for task in tasks]

    def _body(self, arrival: EdgeArrival, prompt: PromptOf, salt: str) -> dict[str, Any]:
        return {
            "model": DEMO.name,
            "prompt": prompt(arrival.task, arrival.number),
            "max_tokens": self._max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "cache_salt": f"{salt} {arrival.task} {arrival.number}",
        }

    async def _ask(self, arrival: EdgeArrival, body: dict[str, Any], started: float) -> EdgeAnswer:
        headers = {"X-Moesaic-Site": f"agent-{arrival.site}"}
        try:
            answer = await self._client.post("/v1/completions", json=body, headers=headers)
            answer.raise_for_status()
        except httpx.HTTPError as error:
            return EdgeAnswer(arrival, time.perf_counter() - started, failure=repr(error))
        end_s, told = time.perf_counter() - started, answer.json()
        degraded_share = told["moesaic"]["quality"]["degraded_share"]
        return EdgeAnswer(arrival, end_s, told["usage"]["total_tokens"], degraded_share)


def rest_client(port: int) -> httpx.AsyncClient:
    """Make a client that opens as many connections as there are requests under way."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    return httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{port}", timeout=ANSWER_S, limits=limits, trust_env=False
    )
