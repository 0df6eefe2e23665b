"""The policies by name."""

from collections.abc import Callable

from moesaic.errors import InvalidInput
from moesaic.placement import uniform as dealt
from moesaic.placement.problem import Problem
from moesaic.placement.uniform import Slots

Policy = Callable[[Problem], list[Slots]]


def uniform(problem: Problem) -> list[Slots]:
    """Deal the experts round and round, whatever the traffic."""
    problem.require_room()
    return dealt.uniform(problem.num_experts, len(problem.traffic), problem.slots)


POLICIES: dict[str, Policy] = {"uniform": uniform}


def make_placement(name: str, problem: Problem) -> list[Slots]:
    """Ask the policy ``name``.

    Raises:
        InvalidInput: there is no such policy.
        PlacementInfeasible: the slots cannot hold every expert.
        NotReady: the policy needs a package that is not installed.
    """
    if name not in POLICIES:
        raise InvalidInput("policy", f"must be one of {', '.join(POLICIES)}, got {name!r}")
    return POLICIES[name](problem)
