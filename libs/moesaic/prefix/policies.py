"""Policies by name: ``prefix-flops`` is ours, ``moe-prefill`` the paper's frontend (section 7, algorithm 1)."""

from typing import cast

from moesaic.errors import InvalidInput
from moesaic.plugins import plugins
from moesaic.prefix.fleet import Job, Shadow, ShadowFleet
from moesaic.prefix.policy import Behind, Pick, Policy, RoutingContext

POLICY_NAMES = ("prefix-flops", "moe-prefill")
# A spill that makes a prompt so many times as dear is worth waiting for another worker. In simulated
# mixes of long shared and short single prompts anything from 1.1 to 2 did equally well.
WORTH_WAITING = 1.25


class PrefixFlops(Policy):
    """The longest cached prefix; ties, and no prefix: the least work.

    | All with the longest prefix are saturated, and | The job goes to |
    |---|---|
    | the policy is not ``patient`` (the paper's) | the next best worker, which computes the prefix again |
    | that costs little (``WORTH_WAITING``) | the next best worker |
    | a worker has no prompt to compute | the best of such workers |
    | otherwise | nobody yet: it waits for a worker with the prefix |

    With ``consolidate``, while the fleet is not saturated, ties go to workers that have begun to
    fill up, the fullest first. The reason is that a step hides its transfers only from the
    threshold on. A worker that has been filling for ``max_wait_s`` without a pause has no such
    right.
    """

    holds = True

    def __init__(self, *, patient: bool, consolidate: bool, max_wait_s: float) -> None:
        self._patient, self._consolidate, self._max_wait_s = patient, consolidate, max_wait_s

    def pick(self, job: Job, fleet: ShadowFleet, room: int, asked: RoutingContext) -> Pick | Behind:
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

    def _choose(self, fleet: ShadowFleet, best: int, asked: RoutingContext) -> Shadow:
        if self._consolidate and not asked.waited and fleet.remaining < fleet.capacity:
            filling = best & fleet.busy & fleet.unsaturated
            while filling:
                fullest = fleet.most_filled(filling)
                if asked.now_s - fullest.busy_since_s < self._max_wait_s:
                    return fullest
                filling &= ~fullest.bit
        return fleet.least_loaded(best)


def make_policy(name: str, *, consolidate: bool, max_wait_s: float) -> Policy:
    """Make a policy by its name; those that other packages add have no options.

    Raises:
        InvalidInput: there is no such policy.
    """
    if name in POLICY_NAMES:
        patient = name == "prefix-flops"
        return PrefixFlops(patient=patient, consolidate=consolidate, max_wait_s=max_wait_s)
    if (added := plugins("router_policies").get(name)) is None:
        raise InvalidInput("policy", f"must be one of {', '.join(POLICY_NAMES)}")
    return cast("type[Policy]", added.load())()
