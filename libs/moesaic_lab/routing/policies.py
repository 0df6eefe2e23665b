"""Policies of today's servers to compare with, for the gateway by entry points ``moesaic.router_policies``.

Policies are turns, vLLM's count of requests, a count of tokens, PrefillOnly's order by length, and prefix
affinity alone.
"""

from moesaic.prefix.fleet import Job, ShadowFleet
from moesaic.prefix.policy import Pick, Policy, known_prefix


class RoundRobin(Policy):
    """Each worker in turn."""

    def __init__(self) -> None:
        self._last = -1

    def pick(self, job: Job, fleet: ShadowFleet, room: int, allowed: int) -> Pick:
        """See ``Policy``."""
        later = room >> (self._last + 1) << (self._last + 1)
        worker = next(fleet.members(later or room))
        self._last = worker.idx
        return known_prefix(fleet, job, worker)


class LeastRequests(Policy):
    """The fewest requests, those that have not begun counting four times (vLLM's default)."""

    def pick(self, job: Job, fleet: ShadowFleet, room: int, allowed: int) -> Pick:
        """See ``Policy``."""
        least = min(fleet.members(room), key=lambda w: 4 * w.num_requests - 3 * w.num_began)
        return known_prefix(fleet, job, least)


class LeastTokens(Policy):
    """The fewest tokens that are yet to be computed or generated, cached or not."""

    def pick(self, job: Job, fleet: ShadowFleet, room: int, allowed: int) -> Pick:
        """See ``Policy``."""
        least = min(fleet.members(room), key=lambda worker: worker.num_tokens)
        return known_prefix(fleet, job, least)


class ShortestPrefillFirst(Policy):
    """The shortest uncached prefill first (PrefillOnly); it goes to the worker with the least work."""

    holds = True
    reorders = True

    def pick(self, job: Job, fleet: ShadowFleet, room: int, allowed: int) -> Pick:
        """See ``Policy``."""
        return known_prefix(fleet, job, fleet.least_loaded(room))

    def length(self, job: Job, fleet: ShadowFleet) -> int:
        """Count the tokens to compute where most of them are cached."""
        depth, _ = fleet.index.match(job.hashes, fleet.accepting)
        return job.num_tokens - fleet.cached_tokens(job, depth)


class PrefixOnly(Policy):
    """The longest cached prefix, whatever the load; ties: the fewest requests."""

    def pick(self, job: Job, fleet: ShadowFleet, room: int, allowed: int) -> Pick:
        """See ``Policy``."""
        depth, best = fleet.index.match(job.hashes, room)
        return Pick(min(fleet.members(best), key=lambda worker: worker.num_requests), depth)


BASELINES: dict[str, type[Policy]] = {
    "round-robin": RoundRobin,
    "least-requests": LeastRequests,
    "least-tokens": LeastTokens,
    "shortest-prefill-first": ShortestPrefillFirst,
    "prefix-only": PrefixOnly,
}
