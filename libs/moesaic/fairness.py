"""Who is served next and who gives way, so that nobody's flood keeps others waiting. Pure.

Everything that waits has a ``Claim``. A tenant may put its work behind everyone's (a priority above
0), but before its own only (one below 0). Among work of one such level, tenants take turns by what
they have had; within a tenant, less ``priority`` goes first. Requests that have had more than a
step's worth are long ones: in a tenant, these and all others take turns again, so that a short
request is served soon beside one that asks for thousands. Whatever is left is by arrival.
"""

import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

MAX_REQUESTS = 1 << 13  # of which is remembered what they have had
Party = TypeVar("Party", bound=Hashable)


class Claim(NamedTuple):
    """Whose work it is, and how urgent."""

    tenant: str = ""
    request: str = ""  # of the caller, which may consist of many works
    priority: int = 0  # less goes first
    arrival: int = 0  # counts up

    @property
    def level(self) -> int:
        """How far behind others it has put itself; counts across tenants."""
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
    """Whatever has a claim."""

    @property
    def claim(self) -> Claim:
        """See ``Claim``."""
        ...


T = TypeVar("T", bound=Claimant)


class Turns(Generic[Party]):
    """Turns among parties by what they have had while others waited (start-time fair queueing).

    Whoever comes, or comes back, starts level with the least served of those that wait: it has no
    claim to what was given away before. Once nobody is left waiting, all start anew.
    """

    def __init__(self) -> None:
        self._had: dict[Party, int] = {}
        self._now = 0

    def start(self, party: Party) -> int:
        """What counts as had by ``party``; less goes first."""
        return max(self._had.get(party, 0), self._now)

    def served(self, amounts: Mapping[Party, int], waiting: Collection[Party]) -> None:
        """Each party was given so much, and ``waiting`` want more."""
        if not waiting:
            self._had, self._now = {}, 0
            return
        now = min(map(self.start, waiting))
        had = self._had | {party: self.start(party) + n for party, n in amounts.items()}
        self._had, self._now = {party: n for party, n in had.items() if n > now}, now


@dataclass
class Shares:
    """What tenants and their requests have had of something that is handed out step by step."""

    _tenants: Turns[str] = field(default_factory=Turns)
    _kinds: dict[str, Turns[bool]] = field(
        default_factory=dict
    )  # of each tenant: long ones, others
    _had: OrderedDict[tuple[str, str], int] = field(default_factory=OrderedDict)  # by request

    def is_long(self, claim: Claim, quantum: int) -> bool:
        """Whether its request has had ``quantum`` or more."""
        return self._had.get(claim.owner, 0) >= quantum

    def in_turn(self, works: Iterable[T], quantum: int) -> list[T]:
        """The works, whoever is to be served first first."""
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
        """So much was given, and those that are ``waiting`` want more. Levels behind the most
        urgent one take what that leaves, so they do not count."""
        given = list(given)
        if not given:
            return
        had = self._had
        wanting = {  # one for all that are alike, since many may wait
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
        """Nobody waits: what was had so far is no longer held against anyone."""
        self._tenants, self._kinds = Turns(), {}

    def note(self, claim: Claim, amount: int) -> None:
        """The request of this claim has had so much more."""
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
    """Who has to leave, so that ``newcomer`` gets what it needs; None: it has no right to it.

    Those behind it leave: of a level behind its own, or of its tenant with more ``priority``. So do
    works of a tenant, or of a request of the same tenant (``among_requests``), that has more; but
    only as far as it then still has as much as the newcomer's. So nobody is driven out by whom it
    has driven out.

    Args:
        newcomer: who wants something.
        needs: so much.
        free: what nobody holds.
        holders: who has some.
        amount: how much one holds.
        may_leave: whether one can be made to.
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
