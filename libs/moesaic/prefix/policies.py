"""Policies by name: ``prefix-flops`` is ours, ``moe-prefill`` the paper's frontend (section 7, algorithm 1)."""

from typing import cast

from moesaic.errors import InvalidInput
from moesaic.plugins import plugins
from moesaic.prefix.fleet import Job, ShadowFleet
from moesaic.prefix.policy import Behind, Pick, Policy

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
    """

    holds = True

    def __init__(self, *, patient: bool) -> None:
        self._patient = patient

    def pick(self, job: Job, fleet: ShadowFleet, room: int, allowed: int) -> Pick | Behind:
        """See ``Policy``."""
        depth, best = fleet.index.match(job.hashes, allowed)
        if here := best & room:
            return Pick(fleet.least_loaded(here), depth)
        there, others = fleet.index.match(job.hashes, room)
        loses = fleet.prompt_flops(job, there) > WORTH_WAITING * fleet.prompt_flops(job, depth)
        if self._patient and loses:
            free = room & ~fleet.prefilling
            if not free:
                return Behind(best)
            there, others = fleet.index.match(job.hashes, free)
        return Pick(fleet.least_loaded(others), there, spilled=True)


def make_policy(name: str) -> Policy:
    """Make a policy by its name.

    Raises:
        InvalidInput: there is no such policy.
    """
    if name in POLICY_NAMES:
        return PrefixFlops(patient=name == "prefix-flops")
    if (added := plugins("router_policies").get(name)) is None:
        raise InvalidInput("policy", f"must be one of {', '.join(POLICY_NAMES)}")
    return cast("type[Policy]", added.load())()
