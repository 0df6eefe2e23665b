"""Clients of a gateway that have prompts to be read: a fixed number of them, each with one request at a time."""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.common.raw_http import Connection, encoded


@dataclass(frozen=True)
class Answered:
    """Time and tokens of a set of prompts."""

    seconds: float
    tokens: int  # of the prompts
    cached: int  # of these

    @property
    def tokens_per_s(self) -> float:
        """Prompt tokens answered for, cached or not."""
        return self.tokens / self.seconds


async def ask_all(port: int, prompts: Sequence[list[int]], salt: str, clients: int) -> Answered:
    """Have every prompt read, one token answered to each; ``salt`` keeps them from others' caches."""
    bodies = iter(
        [
            encoded({"prompt": p, "max_tokens": 1, "temperature": 0, "cache_salt": salt})
            for p in prompts
        ]
    )
    started = time.perf_counter()
    cached = await asyncio.gather(
        *[_client(port, lambda: next(bodies, None)) for _ in range(clients)]
    )
    return Answered(time.perf_counter() - started, sum(map(len, prompts)), sum(cached))


async def _client(port: int, next_body: Callable[[], bytes | None]) -> int:
    """Ask until no prompt is left, and add up the cached tokens of all answers."""
    connection, cached = await Connection.open(port), 0
    while (body := next_body()) is not None:
        status, answer = await connection.post("/v1/completions", body)
        if status != 200:
            raise RuntimeError(f"{status}: {answer!r}")
        details = json.loads(answer)["usage"].get("prompt_tokens_details") or {}
        cached += details.get("cached_tokens") or 0
    connection.close()
    return cached
