"""Clients of a gateway that have prompts to be read: a fixed number of them, each with one request at a time."""

from collections.abc import Sequence
from dataclasses import dataclass

from moesaic.cli.load.generator import COMPLETIONS, LoadClient


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
    """Have every prompt read, one token answered to each; ``salt`` keeps them from others' caches.

    Raises:
        RuntimeError: a request was not answered.
    """
    usual = {"max_tokens": 1, "temperature": 0, "cache_salt": salt}
    client = LoadClient(port, COMPLETIONS)
    await client.open(clients)
    requests = await client.closed_loop(
        clients, lambda number: {"prompt": prompts[number], **usual}, count=len(prompts)
    )
    client.close()
    if failed := [each.status for each in requests if not each.complete]:
        raise RuntimeError(f"{len(failed)} requests failed, by status: {sorted(set(failed))}")
    seconds = max(each.end_s for each in requests)
    cached = sum(each.cached_tokens for each in requests)
    return Answered(seconds, sum(map(len, prompts)), cached)
