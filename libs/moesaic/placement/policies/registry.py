"""The policies by name."""

from collections.abc import Callable

from moesaic.errors import InvalidInput
from moesaic.placement.policies.balanced import eplb, eplb_by_batches, redundance, smartmoe, uniform
from moesaic.placement.policies.janus import by_batches, janus, unscaled
from moesaic.placement.policies.remote import dance, optimal
from moesaic.placement.problem import Problem
from moesaic.placement.uniform import Slots

Policy = Callable[[Problem], list[Slots]]

AUTO, KEEP = "auto", "keep"  # take the best of several; leave experts where they are
POLICIES: dict[str, Policy] = {
    "uniform": uniform,
    "redundance": redundance,
    "smartmoe": smartmoe,
    "eplb": eplb,
    "eplb-batches": eplb_by_batches,
    "janus": janus,
    "janus-unscaled": unscaled,
    "janus-batches": by_batches,
    "dance": dance,
    "optimal": optimal,
}


def require_policy(policy: str) -> str:
    """Refuse what re-places experts by no name that is known.

    Raises:
        InvalidInput: naming those that are.
    """
    known = [AUTO, KEEP, *POLICIES]
    if policy not in known:
        raise InvalidInput("policy", f"must be one of {', '.join(known)}, got {policy!r}")
    return policy


def make_placement(name: str, problem: Problem) -> list[Slots]:
    """Ask the policy ``name``.

    Raises:
        InvalidInput: there is no such policy, or it needs a package that is not installed.
        PlacementInfeasible: the slots cannot hold every expert.
    """
    if name not in POLICIES:
        raise InvalidInput("policy", f"must be one of {', '.join(POLICIES)}, got {name!r}")
    return POLICIES[name](problem)
