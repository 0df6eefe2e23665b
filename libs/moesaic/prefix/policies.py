"""How to pick a worker: ours, and what it is measured against. All look at the same shadows.

``prefix-flops`` is ours, ``moe-prefill`` the paper's frontend that it comes from (section 7,
algorithm 1). The others are what servers do today: turns, vLLM's count of requests, a count of
tokens, PrefillOnly's order by length, and prefix affinity alone.
"""

from abc import ABC, abstractmethod
from typing import Literal, NamedTuple, get_args

from moesaic.prefix.fleet import Fleet
from moesaic.prefix.shadows import Job, Shadow

PolicyName = Literal[
    "prefix-flops",
    "moe-prefill",
    "round-robin",
    "least-requests",
    "least-tokens",
    "shortest-prefill-first",
    "prefix-only",
]
# A spill that makes a prompt so many times as dear is worth waiting for another worker. In simulated
# mixes of long shared and short single prompts anything from 1.1 to 2 did equally well.
WORTH_WAITING = 1.25
POLICY_NAMES: tuple[PolicyName, ...] = get_args(PolicyName)


class Pick(NamedTuple):
    """A worker, and how many of the job's first blocks it has."""

    worker: Shadow
    cached_blocks: int
    spilled: bool = False  # saturated workers have more of them


class Behind(NamedTuple):
    """Better wait for one of these: a bitset of saturated workers."""

    workers: int


class Asked(NamedTuple):
    """What else a policy may look at."""

    allowed: int  # bitset of all that the job may go to, saturated or not
    waited: bool  # the job has waited as long as it may
    now_s: float


class Policy(ABC):
    """One way to route.

    Attributes:
        holds: requests wait while every worker is saturated.
        reorders: those that wait go by ``length`` rather than by arrival.
    """

    holds = False
    reorders = False

    @abstractmethod
    def pick(self, job: Job, fleet: Fleet, room: int, asked: Asked) -> Pick | Behind:
        """Choose among the workers of the bitset ``room``, not none, or have the job wait.

        A job that has waited as long as it may must not wait; ``room`` is then all it may go to.
        """

    def length(self, job: Job, fleet: Fleet) -> int:
        """What waiting jobs are ordered by, where the policy reorders; less goes first."""
        raise NotImplementedError


def _known(fleet: Fleet, job: Job, worker: Shadow) -> Pick:
    return Pick(worker, fleet.index.match(job.hashes, worker.bit)[0])


class PrefixFlops(Policy):
    """The longest cached prefix; ties, and no prefix: the least work.

    Where all that have the longest prefix are saturated, the paper's algorithm spills to the next
    best worker at once, which computes the prefix again while others wait. A ``patient`` one does
    so only if that costs little (``WORTH_WAITING``) or a worker has no prompt to compute; else the
    job waits for one with the prefix.

    With ``consolidate``, while the whole fleet has less to do than would saturate it, ties go to
    workers that have begun to fill up instead, the fullest first: a step hides its transfers only
    from the threshold on. A worker that has been filling for ``max_wait_s`` without a rest is no
    longer preferred.
    """

    holds = True

    def __init__(self, *, patient: bool, consolidate: bool, max_wait_s: float) -> None:
        self._patient, self._consolidate, self._max_wait_s = patient, consolidate, max_wait_s

    def pick(self, job: Job, fleet: Fleet, room: int, asked: Asked) -> Pick | Behind:
        """See ``Policy``."""
        depth, best = fleet.index.match(job.hashes, asked.allowed)
        if here := best & room:
            return Pick(self._choose(fleet, here, asked), depth)
        there, others = fleet.index.match(job.hashes, room)
        loses = fleet.prompt_flops(job, there) > WORTH_WAITING * fleet.prompt_flops(job, depth)
        if self._patient and loses:
            free = room & ~fleet.prefilling
            if not free:
                return Behind(best)
            there, others = fleet.index.match(job.hashes, free)
        return Pick(self._choose(fleet, others, asked), there, spilled=True)

    def _choose(self, fleet: Fleet, best: int, asked: Asked) -> Shadow:
        if self._consolidate and not asked.waited and fleet.remaining < fleet.capacity:
            filling = best & fleet.busy & fleet.unsaturated
            while filling:
                fullest = fleet.most_filled(filling)
                if asked.now_s - fullest.busy_since_s < self._max_wait_s:
                    return fullest
                filling &= ~fullest.bit
        return fleet.least_loaded(best)


class RoundRobin(Policy):
    """Each worker in turn."""

    def __init__(self) -> None:
        self._last = -1

    def pick(self, job: Job, fleet: Fleet, room: int, asked: Asked) -> Pick:
        """See ``Policy``."""
        later = room >> (self._last + 1) << (self._last + 1)
        worker = next(fleet.members(later or room))
        self._last = worker.slot
        return _known(fleet, job, worker)


class LeastRequests(Policy):
    """The fewest requests, those that have not begun counting four times (vLLM's default)."""

    def pick(self, job: Job, fleet: Fleet, room: int, asked: Asked) -> Pick:
        """See ``Policy``."""
        least = min(fleet.members(room), key=lambda w: 4 * w.num_requests - 3 * w.num_began)
        return _known(fleet, job, least)


class LeastTokens(Policy):
    """The fewest tokens that are yet to be computed or generated, cached or not."""

    def pick(self, job: Job, fleet: Fleet, room: int, asked: Asked) -> Pick:
        """See ``Policy``."""
        least = min(fleet.members(room), key=lambda worker: worker.num_tokens)
        return _known(fleet, job, least)


class ShortestPrefillFirst(Policy):
    """Of those that wait, the shortest uncached prefill (PrefillOnly); it goes to the least work."""

    holds = True
    reorders = True

    def pick(self, job: Job, fleet: Fleet, room: int, asked: Asked) -> Pick:
        """See ``Policy``."""
        return _known(fleet, job, fleet.least_loaded(room))

    def length(self, job: Job, fleet: Fleet) -> int:
        """Tokens to compute where most of them are cached."""
        depth, _ = fleet.index.match(job.hashes, fleet.accepting)
        return job.num_tokens - fleet.cached_tokens(job, depth)


class PrefixOnly(Policy):
    """The longest cached prefix, whatever the load; ties: the fewest requests."""

    def pick(self, job: Job, fleet: Fleet, room: int, asked: Asked) -> Pick:
        """See ``Policy``."""
        depth, best = fleet.index.match(job.hashes, room)
        return Pick(min(fleet.members(best), key=lambda worker: worker.num_requests), depth)


def make_policy(name: PolicyName, *, consolidate: bool, max_wait_s: float) -> Policy:
    """A policy by its name; the options are for those that know them."""
    if name in ("prefix-flops", "moe-prefill"):
        patient = name == "prefix-flops"
        return PrefixFlops(patient=patient, consolidate=consolidate, max_wait_s=max_wait_s)
    others: dict[PolicyName, type[Policy]] = {
        "round-robin": RoundRobin,
        "least-requests": LeastRequests,
        "least-tokens": LeastTokens,
        "shortest-prefill-first": ShortestPrefillFirst,
        "prefix-only": PrefixOnly,
    }
    return others[name]()
