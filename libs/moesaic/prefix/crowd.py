"""The requests that wait, and room for more: what would only be refused later is refused at once. Pure.

Workers let so many requests, and tokens of prompts, wait, and turn away what comes beyond. So the same rules are asked
before anything is done for a request (``moesaic.engine.steps.admission`` has them one by one): where the room is
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

    def join(self, tenant: str, priority: int, num_tokens: int, count: int = 1) -> None:
        """Add requests that wait, with so many tokens together."""
        self._count((tenant, priority), count, num_tokens)

    def leave(self, tenant: str, priority: int, num_tokens: int, count: int = 1) -> None:
        """Take requests out that have begun, or wait no more."""
        kind = tenant, priority
        self._count(kind, -count, -num_tokens)
        if not self._requests[kind]:
            del self._requests[kind], self._tokens[kind]

    def takes(self, tenant: str, priority: int, wanted: Room, room: Room) -> bool:
        """Tell if so many more may wait, all of them."""
        kind = tenant, priority
        if not _fits(self._requests, kind, wanted.num_requests, room.num_requests):
            return False
        # Where nothing waits, a queue takes a prompt of any length.
        needs = min(wanted.num_tokens, room.num_tokens)
        return not self.num_tokens or _fits(self._tokens, kind, needs, room.num_tokens)

    def _count(self, kind: Kind, num_requests: int, num_tokens: int) -> None:
        self._requests[kind] += num_requests
        self._tokens[kind] += num_tokens
        self.num_requests += num_requests
        self.num_tokens += num_tokens


def _fits(amounts: Counter[Kind], newcomer: Kind, needs: int, room: int) -> bool:
    """Tell if a newcomer finds room, where all leave who have to: ``moesaic.fairness.who_gives_way`` says who."""
    lacking = needs - max(0, room - amounts.total())
    if lacking <= 0:
        return True
    tenant, priority = newcomer
    level = max(0, priority)
    leaving = 0
    held: Counter[str] = Counter()
    for (other, others), amount in amounts.items():
        if others > level or (other == tenant and others > priority):
            leaving += amount
        elif max(0, others) == level:
            held[other] += amount
    keeps = held.pop(tenant, 0) + needs
    leaving += sum(max(0, amount - keeps) for amount in held.values())
    return leaving >= lacking
