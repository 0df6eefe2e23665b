"""Fair order among tenants: nobody's flood keeps others waiting. Pure.

Everything that waits has a ``Claim``. Claims are served by these rules, the first one first:

| Rule | Order |
|---|---|
| level | a ``priority`` above 0 puts work behind everyone's of a lower one |
| tenant | tenants of a level take turns, by the amounts that they have had |
| priority | within a tenant, less goes first; one below 0 goes before the tenant's own work only |
| length | requests that have had a quantum or more are long: they take turns with the tenant's others |
| arrival | the earlier goes first |

So a short request is served soon, even beside one that asks for thousands of tokens.
"""

import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

MAX_REQUESTS = 1 << 13  # whose amounts are remembered
Party = TypeVar("Party", bound=Hashable)


class Claim(NamedTuple):
    """The owner of some work, and its urgency."""

    tenant: str = ""
    request: str = ""  # of the caller; it may be many pieces of work
    priority: int = 0  # less goes first
    arrival: int = 0  # counts up

    @property
    def level(self) -> int:
        """Levels that the work has put itself behind others; counts across tenants."""
        return max(0, self.priority)

    @property
    def party(self) -> tuple[int, str]:
        """The tenant, at this level."""
        return max(0, self.priority), self.tenant

    @property
    def owner(self) -> tuple[str, str]:
        """Names the request among those of all tenants."""
        return self.tenant, self.request


class Claimant(Protocol):
    """Anything with a claim."""

    @property
    def claim(self) -> Claim:
        """See ``Claim``."""
        ...


T = TypeVar("T", bound=Claimant)


class Turns(Generic[Party]):
    """Turns among parties, by the amounts that they have had while others waited.

    This is start-time fair queueing: a party that comes, or comes back, starts level with the least
    served of those that wait. Once nobody is left waiting, all start anew.
    """

    def __init__(self) -> None:
        self._had: dict[Party, int] = {}
        self._now = 0

    def start(self, party: Party) -> int:
        """Count what ``party`` has had; less goes first."""
        return max(self._had.get(party, 0), self._now)

    def served(self, amounts: Mapping[Party, int], waiting: Collection[Party]) -> None:
        """Note the amounts that parties were given while those in ``waiting`` want more."""
        if not waiting:
            self._had, self._now = {}, 0
            return
        now = min(map(self.start, waiting))
        had = self._had | {party: self.start(party) + n for party, n in amounts.items()}
        self._had, self._now = {party: n for party, n in had.items() if n > now}, now


@dataclass
class Shares:
    """Amounts that tenants and their requests have had of something handed out step by step."""

    _tenants: Turns[str] = field(default_factory=Turns)
    # Of each tenant: turns between its long requests and its others.
    _kinds: dict[str, Turns[bool]] = field(default_factory=dict)
    _had: OrderedDict[tuple[str, str], int] = field(default_factory=OrderedDict)  # by request

    def is_long(self, claim: Claim, quantum: int) -> bool:
        """True if the claim's request has had ``quantum`` or more."""
        return self._had.get(claim.owner, 0) >= quantum

    def in_turn(self, works: Iterable[T], quantum: int) -> list[T]:
        """Sort works by the rules, the first to be served first."""
        had, kinds_of = self._had, self._kinds
        alike: dict[tuple[str, int, bool], list[T]] = {}
        oldest: dict[str, int] = {}  # ties between tenants go by the oldest of their works
        for work in works:
            tenant, request, priority, arrival = work.claim
            is_long = had.get((tenant, request), 0) >= quantum
            alike.setdefault((tenant, priority, is_long), []).append(work)
            oldest[tenant] = min(oldest.get(tenant, arrival), arrival)
        place = {tenant: (self._tenants.start(tenant), first) for tenant, first in oldest.items()}
        none: Turns[bool] = Turns()

        def rank(group: tuple[str, int, bool]) -> tuple[int, tuple[int, int], int, int, bool]:
            tenant, priority, is_long = group
            start = kinds_of.get(tenant, none).start(is_long)
            return max(0, priority), place[tenant], priority, start, is_long

        by_arrival = [sorted(alike[group], key=_arrival) for group in sorted(alike, key=rank)]
        return list(itertools.chain.from_iterable(by_arrival))

    def served(
        self, given: Iterable[tuple[Claim, int]], waiting: Iterable[Claim], quantum: int
    ) -> None:
        """Note the amounts that claims were given while those in ``waiting`` want more.

        Levels behind the most urgent one get its leavings, so they do not count.
        """
        given = list(given)
        if not given:
            return
        had = self._had
        # One for all that are alike, since many may wait.
        wanting = {
            (max(0, priority), tenant, had.get((tenant, request), 0) >= quantum)
            for tenant, request, priority, _ in waiting
        }
        if not wanting:
            self.start_anew()
            return
        level = min(min(wanting)[0], min(claim.level for claim, _ in given))
        amounts: Counter[str] = Counter()
        by_kind: dict[str, Counter[bool]] = {}
        for claim, amount in given:
            if claim.level == level:
                amounts[claim.tenant] += amount
                kind = by_kind.setdefault(claim.tenant, Counter())
                kind[self.is_long(claim, quantum)] += amount
        left: dict[str, set[bool]] = {}
        for its_level, tenant, is_long in wanting:
            if its_level == level:
                left.setdefault(tenant, set()).add(is_long)
        self._tenants.served(amounts, left.keys())
        self._kinds = {tenant: self._kinds.get(tenant) or Turns() for tenant in left}
        for tenant, turns in self._kinds.items():
            turns.served(by_kind.get(tenant, {}), left[tenant])

    def start_anew(self) -> None:
        """Forget the amounts of all tenants: nobody waits."""
        self._tenants, self._kinds = Turns(), {}

    def note(self, claim: Claim, amount: int) -> None:
        """Add to the amount that a claim's request has had."""
        self._had[claim.owner] = self._had.pop(claim.owner, 0) + amount
        if len(self._had) > MAX_REQUESTS:
            self._had.popitem(last=False)


def who_gives_way(
    newcomer: Claim,
    needs: int,
    free: int,
    holders: Sequence[T],
    amount: Callable[[T], int],
    *,
    may_leave: Callable[[T], bool] = lambda _: True,
    among_requests: bool = True,
) -> list[T] | None:
    """Choose the holders that leave, so that ``newcomer`` gets what it needs.

    | Holder | Leaves |
    |---|---|
    | of a level behind the newcomer's | always |
    | of the newcomer's tenant, with more ``priority`` | always |
    | of a tenant that holds more than the newcomer's | while its tenant keeps as much as the newcomer's will have |
    | of a request that holds more, of the same tenant | likewise, with ``among_requests`` |

    The last two rules keep two parties from driving each other out in turns.

    Args:
        newcomer: claim of the work that needs something.
        needs: its need.
        free: the amount that nobody holds.
        holders: all that hold some.
        amount: gives the amount of one holder.
        may_leave: false for a holder that cannot leave.
        among_requests: apply the last rule.

    Returns:
        The holders that leave, in order; None: the newcomer has no right to what it needs.
    """
    if needs <= free:
        return []
    by_tenant: Counter[str] = Counter()
    by_request: Counter[tuple[str, str]] = Counter()
    for work in holders:
        if work.claim.level == newcomer.level:
            by_tenant[work.claim.tenant] += amount(work)
            by_request[work.claim.owner] += amount(work)

    def owes(claim: Claim, held: int) -> bool:
        if claim.level != newcomer.level:
            return claim.level > newcomer.level
        if claim.tenant != newcomer.tenant:
            return by_tenant[claim.tenant] - held >= by_tenant[newcomer.tenant] + needs
        if claim.priority != newcomer.priority:
            return claim.priority > newcomer.priority
        has_more = by_request[claim.owner] - held >= by_request[newcomer.owner] + needs
        return among_requests and claim.owner != newcomer.owner and has_more

    def last(work: T) -> tuple[int, int, int, int, int]:
        claim = work.claim
        held_by_request = by_request[claim.owner] if among_requests else 0
        held_by_tenant = by_tenant[claim.tenant]
        return claim.level, held_by_tenant, claim.priority, held_by_request, claim.arrival

    staying = [work for work in holders if may_leave(work) and amount(work)]
    leaving: list[T] = []
    while free < needs:
        owing = [work for work in staying if owes(work.claim, amount(work))]
        if not owing:
            return None
        victim = max(owing, key=last)
        staying.remove(victim)
        leaving.append(victim)
        free += amount(victim)
        if victim.claim.level == newcomer.level:
            by_tenant[victim.claim.tenant] -= amount(victim)
            by_request[victim.claim.owner] -= amount(victim)
    return leaving


def _arrival(work: Claimant) -> int:
    return work.claim.arrival
