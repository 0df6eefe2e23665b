"""Every policy where instances have memory, on devices, for experts of equal and unequal size."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings

from moesaic.errors import InvalidInput, PlacementInfeasible
from moesaic.placement.policies import make_placement
from moesaic.placement.policies.dance import layer_counts
from moesaic.placement.policies.packing import fitted, pack_devices
from moesaic.placement.policies.problem import PlacementProblem
from moesaic.placement.policies.room import even_shares
from moesaic_lab.placement.policies import ALL_POLICIES
from tests.placement.drawn import traffic_of
from tests.placement.policies.edges import edges, has_room, require_sound


@pytest.mark.parametrize("name", ALL_POLICIES)
@settings(max_examples=40, deadline=None)
@given(problem=edges())
def test_every_policy_covers_layers_within_memory_or_says_what_is_missing(
    name: str, problem: PlacementProblem
) -> None:
    if not has_room(problem):
        with pytest.raises(PlacementInfeasible) as caught:
            make_placement(name, problem)
        assert caught.value.missing_slots > 0
        assert caught.value.missing_bytes > 0
        return

    placed = make_placement(name, problem)

    require_sound(problem, placed)
    assert placed == make_placement(name, problem)


@pytest.mark.parametrize("name", ALL_POLICIES)
def test_a_shortfall_of_memory_is_exact(name: str) -> None:
    # Six experts fit where eight are needed: half an expert is left on each device.
    problem = PlacementProblem(
        traffic=(traffic_of(4, 1),) * 2,
        slots=(4, 4),
        memory=((150, 250), (350,)),
        expert_bytes=100,
    )

    with pytest.raises(PlacementInfeasible) as caught:
        make_placement(name, problem)

    assert (caught.value.missing_slots, caught.value.missing_bytes) == (2, 200)


@settings(max_examples=60, deadline=None)
@given(problem=edges(sizes=((10,),)))
def test_memory_for_what_is_missing_suffices_and_for_one_less_does_not(
    problem: PlacementProblem,
) -> None:
    assume(min(problem.slots) >= problem.num_experts)  # else more memory may not help
    assume(not has_room(problem))
    with pytest.raises(PlacementInfeasible) as caught:
        even_shares(problem)
    missing = caught.value.missing_slots

    assert has_room(grown(problem, missing))
    assert not has_room(grown(problem, missing - 1))


def grown(problem: PlacementProblem, devices: int) -> PlacementProblem:
    """The problem with so many more devices, of one expert each, in turn on all instances."""
    assert problem.memory is not None
    memory = [list(mine) for mine in problem.memory]
    for device in range(devices):
        # An instance holds no expert twice, so it is of use only up to all experts.
        roomiest = min(memory, key=lambda mine: sum(size // 10 for size in mine))
        roomiest.append(10 + device % 3)
    return replace(problem, memory=tuple(tuple(mine) for mine in memory))


@settings(max_examples=60, deadline=None)
@given(problem=edges(sizes=((10,),)))
def test_even_shares_of_one_size_differ_by_one_expert_at_most(problem: PlacementProblem) -> None:
    assume(has_room(problem))

    shares = even_shares(problem)

    assert (shares.max(axis=1) - shares.min(axis=1) <= 1).all()
    assert np.ptp(shares.sum(axis=0)) <= 1


@settings(max_examples=60, deadline=None)
@given(problem=edges())
def test_dance_divides_memory_so_that_all_layers_are_covered(problem: PlacementProblem) -> None:
    assume(has_room(problem))
    assert problem.memory is not None

    counts = layer_counts(problem)

    assert (counts.sum(axis=0) >= problem.num_experts).all()
    for row, devices in zip(counts.tolist(), problem.memory, strict=True):
        assert fitted(row, problem.sizes, devices) == row


def test_a_layer_without_entropy_is_covered_all_the_same() -> None:
    demand = np.ones((2, 3, 6))
    demand[:, 1, 1:] = 0  # one expert does all: by entropy alone the layer would get nothing
    problem = PlacementProblem(
        traffic=(traffic_of(6, 0),) * 3,
        slots=(6, 6),
        demand=demand,
        memory=((110,), (75,)),
        expert_bytes=10,
    )

    require_sound(problem, make_placement("dance", problem))


def test_the_largest_are_packed_first() -> None:
    problem = PlacementProblem(
        traffic=(traffic_of(2, 0),) * 2,
        slots=(2,),
        layer_bytes=(10, 30),
        memory=((40, 40),),
    )

    assert pack_devices([[[0, 1]], [[0, 1]]], problem) == [[[0, 1]], [[0, 1]]]
    assert pack_devices([[[0, -1]], [[-1, 1]]], problem) == [[[0, -1]], [[-1, 0]]]
    with pytest.raises(PlacementInfeasible) as caught:
        pack_devices([[[0, 1]], [[0, 1]]], replace(problem, memory=((30, 5),)))
    assert (caught.value.missing_slots, caught.value.missing_bytes) == (3, 50)


def test_problems_that_contradict_themselves_are_refused() -> None:
    def problem(**fields: Any) -> PlacementProblem:
        return PlacementProblem(traffic=(traffic_of(2, 0),) * 2, slots=(2, 2), **fields)

    for fields in (
        {"memory": ((10,),), "expert_bytes": 1},
        {"memory": ((10,), (-1,)), "expert_bytes": 1},
        {"memory": ((10,), (10,))},
        {"memory": ((10,), (10,)), "layer_bytes": (5, 0)},
        {"layer_bytes": (5,)},
        {"held": [[[0], [1]]]},
    ):
        with pytest.raises(InvalidInput):
            problem(**fields)
    with pytest.raises(InvalidInput, match="memory"):
        pack_devices([[[0], [1]]] * 2, problem())
