"""Policies by name: those to serve with, and the baselines that they are compared with."""

from collections.abc import Callable

from moesaic.errors import InvalidInput
from moesaic.placement.policies.baselines import BASELINES
from moesaic.placement.policies.dance import dance
from moesaic.placement.policies.eplb import eplb, eplb_by_batches
from moesaic.placement.policies.janus import by_batches
from moesaic.placement.policies.problem import PlacementProblem
from moesaic.placement.policies.uniform import Slots

Policy = Callable[[PlacementProblem], list[Slots]]

AUTO, KEEP = "auto", "keep"  # take the best of several; leave experts where they are
LISTED: dict[str, Policy] = {
    "eplb": eplb,
    "eplb-batches": eplb_by_batches,
    "janus-batches": by_batches,
    "dance": dance,
}
POLICIES: dict[str, Policy] = {**BASELINES, **LISTED}


def require_policy(policy: str) -> str:
    """Refuse an unknown name of a policy, ``auto`` or ``keep``.

    Raises:
        InvalidInput: naming those to serve with.
    """
    if policy not in (AUTO, KEEP, *POLICIES):
        names = ", ".join([AUTO, KEEP, *LISTED])
        raise InvalidInput("policy", f"must be one of {names}, got {policy!r}")
    return policy


def make_placement(name: str, problem: PlacementProblem) -> list[Slots]:
    """Ask the policy ``name`` for a placement.

    Raises:
        InvalidInput: there is no such policy, or it needs a package that is not installed.
        PlacementInfeasible: the slots cannot hold every expert.
    """
    if name not in POLICIES:
        raise InvalidInput("policy", f"must be one of {', '.join(LISTED)}, got {name!r}")
    return POLICIES[name](problem)
