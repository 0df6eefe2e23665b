"""How to pick a worker: ours, and what it is measured against. All look at the same shadows.

``prefix-flops`` is MoE-Prefill's frontend (section 7, algorithm 1). The others are what servers do
today: turns, vLLM's count of requests, a count of tokens, PrefillOnly's order by length, and prefix
affinity alone.
"""

from abc import ABC, abstractmethod
from typing import Literal, NamedTuple, get_args

from moesaic.prefix.fleet import Fleet, Job, Shadow

PolicyName = Literal[
    "prefix-flops",
    "round-robin",
    "least-requests",
    "least-tokens",
    "shortest-prefill-first",
    "prefix-only",
]
POLICY_NAMES: tuple[PolicyName, ...] = get_args(PolicyName)


class Pick(NamedTuple):
    """A worker, and how many of the job's first blocks it has."""

    worker: Shadow
    cached_blocks: int


class Policy(ABC):
    """One way to route.

    Attributes:
        holds: requests wait while every worker is saturated.
        reorders: those that wait go by ``length`` rather than by arrival.
    """

    holds = False
    reorders = False

    @abstractmethod
    def pick(self, job: Job, fleet: Fleet, candidates: int, *, waited: bool, now_s: float) -> Pick:
        """Choose among ``candidates``, not none.

        Args:
            job: what is to be routed.
            fleet: the workers.
            candidates: bitset of those that may be chosen.
            waited: the job has waited as long as it may.
            now_s: the time.
        """

    def length(self, job: Job, fleet: Fleet) -> int:
        """What waiting jobs are ordered by, where the policy reorders; less goes first."""
        raise NotImplementedError


def _known(fleet: Fleet, job: Job, worker: Shadow) -> Pick:
    return Pick(worker, fleet.index.match(job.hashes, worker.bit)[0])


class PrefixFlops(Policy):
    """The longest cached prefix among unsaturated workers; ties, and no prefix: the least work.

    With ``consolidate``, while the whole fleet has less to do than would saturate it, ties go to
    workers that have begun to fill up instead, the fullest first: a step hides its transfers only
    from the threshold on. A worker that has been filling for ``max_wait_s`` without a rest is no
    longer preferred.
    """

    holds = True

    def __init__(self, *, consolidate: bool, max_wait_s: float) -> None:
        self._consolidate, self._max_wait_s = consolidate, max_wait_s

    def pick(self, job: Job, fleet: Fleet, candidates: int, *, waited: bool, now_s: float) -> Pick:
        """See ``Policy``."""
        depth, best = fleet.index.match(job.hashes, candidates)
        if self._consolidate and not waited and fleet.remaining < fleet.capacity:
            filling = best & fleet.busy & fleet.unsaturated
            while filling:
                fullest = fleet.most_filled(filling)
                if now_s - fullest.busy_since_s < self._max_wait_s:
                    return Pick(fullest, depth)
                filling &= ~fullest.bit
        return Pick(fleet.least_loaded(best), depth)


class RoundRobin(Policy):
    """Each worker in turn."""

    def __init__(self) -> None:
        self._last = -1

    def pick(self, job: Job, fleet: Fleet, candidates: int, *, waited: bool, now_s: float) -> Pick:
        """See ``Policy``."""
        later = candidates >> (self._last + 1) << (self._last + 1)
        worker = next(fleet.members(later or candidates))
        self._last = worker.slot
        return _known(fleet, job, worker)


class LeastRequests(Policy):
    """The fewest requests, those that have not begun counting four times (vLLM's default)."""

    def pick(self, job: Job, fleet: Fleet, candidates: int, *, waited: bool, now_s: float) -> Pick:
        """See ``Policy``."""
        least = min(fleet.members(candidates), key=lambda w: 4 * len(w.jobs) - 3 * w.num_began)
        return _known(fleet, job, least)


class LeastTokens(Policy):
    """The fewest tokens that are yet to be computed or generated, cached or not."""

    def pick(self, job: Job, fleet: Fleet, candidates: int, *, waited: bool, now_s: float) -> Pick:
        """See ``Policy``."""
        least = min(fleet.members(candidates), key=lambda worker: worker.remaining_tokens)
        return _known(fleet, job, least)


class ShortestPrefillFirst(Policy):
    """Of those that wait, the shortest uncached prefill (PrefillOnly); it goes to the least work."""

    holds = True
    reorders = True

    def pick(self, job: Job, fleet: Fleet, candidates: int, *, waited: bool, now_s: float) -> Pick:
        """See ``Policy``."""
        return _known(fleet, job, fleet.least_loaded(candidates))

    def length(self, job: Job, fleet: Fleet) -> int:
        """Tokens to compute where most of them are cached."""
        depth, _ = fleet.index.match(job.hashes, fleet.accepting)
        return job.num_tokens - fleet.cached_tokens(job, depth)


class PrefixOnly(Policy):
    """The longest cached prefix, whatever the load; ties: the fewest requests."""

    def pick(self, job: Job, fleet: Fleet, candidates: int, *, waited: bool, now_s: float) -> Pick:
        """See ``Policy``."""
        depth, best = fleet.index.match(job.hashes, candidates)
        return Pick(min(fleet.members(best), key=lambda worker: len(worker.jobs)), depth)


def make_policy(name: PolicyName, *, consolidate: bool, max_wait_s: float) -> Policy:
    """A policy by its name; the options are for those that know them."""
    if name == "prefix-flops":
        return PrefixFlops(consolidate=consolidate, max_wait_s=max_wait_s)
    others: dict[PolicyName, type[Policy]] = {
        "round-robin": RoundRobin,
        "least-requests": LeastRequests,
        "least-tokens": LeastTokens,
        "shortest-prefill-first": ShortestPrefillFirst,
        "prefix-only": PrefixOnly,
    }
    return others[name]()
