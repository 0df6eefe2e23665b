"""The load: requests of servers' users over REST, each at its server, and what became of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.common.suite import DEMO
from benchmarks.edge.arrivals import EdgeArrival
from moesaic.cli.load.generator import LoadClient, TimedRequest

PromptOf = Callable[[str, int], str]  # by the task and the number


@dataclass(frozen=True)
class EdgeAnswer:
    """One request of a server's users, and what became of it."""

    arrival: EdgeArrival
    request: TimedRequest


@dataclass(frozen=True)
class EdgeClients:
    """The users of all servers."""

    client: LoadClient
    max_tokens: int

    async def ask_all(
        self, due: Sequence[EdgeArrival], prompt: PromptOf, salt: str, start_s: float = 0.0
    ) -> list[EdgeAnswer]:
        """Send requests when they are due, and wait for all answers.

        Args:
            due: requests in the order of time.
            prompt: what is asked.
            salt: no KV is shared with stretches of another one.
            start_s: the time that it is now.
        """
        requests = await self.client.open_loop(
            [arrival.due_s for arrival in due],
            lambda number: self._body(due[number], prompt, salt),
            lambda number: {"X-Moesaic-Site": f"agent-{due[number].site}"},
            start_s,
        )
        return [EdgeAnswer(*each) for each in zip(due, requests, strict=True)]

    def _body(self, arrival: EdgeArrival, prompt: PromptOf, salt: str) -> dict[str, Any]:
        return {
            "model": DEMO.name,
            "prompt": prompt(arrival.task, arrival.number),
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "cache_salt": f"{salt} {arrival.task} {arrival.number}",
        }
