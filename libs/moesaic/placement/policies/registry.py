"""Policies by name. Packages may add others, to compare with: ``moesaic.plugins``."""

from collections.abc import Callable

from moesaic.errors import InvalidInput
from moesaic.placement.policies.dance import dance
from moesaic.placement.policies.eplb import eplb, eplb_by_batches
from moesaic.placement.policies.janus import by_batches
from moesaic.placement.policies.optimal import optimal
from moesaic.placement.policies.problem import PlacementProblem
from moesaic.placement.policies.uniform import Slots
from moesaic.plugins import plugins

Policy = Callable[[PlacementProblem], list[Slots]]

AUTO, KEEP = "auto", "keep"  # take the best of several; leave experts where they are
POLICIES: dict[str, Policy] = {
    "eplb": eplb,
    "eplb-batches": eplb_by_batches,
    "janus-batches": by_batches,
    "dance": dance,
    "optimal": optimal,
}


def require_policy(policy: str) -> str:
    """Refuse an unknown name of a policy, ``auto`` or ``keep``.

    Raises:
        InvalidInput: naming those of this package.
    """
    if policy not in (AUTO, KEEP):
        _policy_named(policy, AUTO, KEEP)
    return policy


def make_placement(name: str, problem: PlacementProblem) -> list[Slots]:
    """Ask the policy ``name`` for a placement.

    Raises:
        InvalidInput: there is no such policy, or it needs a package that is not installed.
        PlacementInfeasible: the slots cannot hold every expert.
    """
    return _policy_named(name)(problem)


def _policy_named(name: str, *others: str) -> Policy:
    if name in POLICIES:
        return POLICIES[name]
    if (added := plugins("placement_policies").get(name)) is not None:
        policy: Policy = added.load()
        return policy
    names = ", ".join([*others, *POLICIES])
    raise InvalidInput("policy", f"must be one of {names}, got {name!r}")
