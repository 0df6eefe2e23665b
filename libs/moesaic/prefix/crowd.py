"""The requests that wait, and room for one more: what would only be refused later is refused at once. Pure.

Workers let so many requests, and tokens of prompts, wait, and turn away what comes beyond. So the same rules are asked
before anything is done for a request (``moesaic.engine.steps.queue_room`` has them one by one): where the room is
taken, one that comes is let in only if somebody has to give way to it.
"""

from collections import Counter
from typing import NamedTuple

Kind = tuple[str, int]  # tenant and priority


class Room(NamedTuple):
    """Bounds of the requests that wait."""

    num_requests: int
    num_tokens: int


class Crowd:
    """The requests that wait: here, on their way to workers, and there until they begin."""

    def __init__(self) -> None:
        self._requests: Counter[Kind] = Counter()
        self._tokens: Counter[Kind] = Counter()
        self.num_requests = self.num_tokens = 0

    def join(self, tenant: str, priority: int, num_tokens: int) -> None:
        """Add a request that waits."""
        self._count((tenant, priority), 1, num_tokens)

    def leave(self, tenant: str, priority: int, num_tokens: int) -> None:
        """Take a request out that has begun, or waits no more."""
        kind = tenant, priority
        self._count(kind, -1, -num_tokens)
        if not self._requests[kind]:
            del self._requests[kind], self._tokens[kind]

    def takes(self, tenant: str, priority: int, num_tokens: int, room: Room) -> bool:
        """Tell if one more may wait."""
        kind = tenant, priority
        if self.num_requests >= room.num_requests and not _gives_way(self._requests, kind, 1):
            return False
        fits = not self.num_tokens or self.num_tokens + num_tokens <= room.num_tokens
        return fits or _gives_way(self._tokens, kind, min(num_tokens, room.num_tokens))

    def _count(self, kind: Kind, num_requests: int, num_tokens: int) -> None:
        self._requests[kind] += num_requests
        self._tokens[kind] += num_tokens
        self.num_requests += num_requests
        self.num_tokens += num_tokens


def _gives_way(amounts: Counter[Kind], newcomer: Kind, needs: int) -> bool:
    """Tell if anybody has to leave for a newcomer, as ``moesaic.fairness.who_gives_way`` chooses them."""
    tenant, priority = newcomer
    level = max(0, priority)
    held: Counter[str] = Counter()
    for (other, others), amount in amounts.items():
        if others > level or (other == tenant and others > priority):
            return True
        if max(0, others) == level:
            held[other] += amount
    mine = held.pop(tenant, 0)
    return any(amount > mine + needs for amount in held.values())
