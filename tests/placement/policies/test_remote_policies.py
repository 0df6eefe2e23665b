"""Policies that spare calls between instances, beside trying everything."""

from dataclasses import replace
from itertools import combinations, product
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.common.remote_calls import remote_calls
from moesaic.placement.policies.dance import dance
from moesaic.placement.policies.optimal import optimal
from moesaic.placement.policies.problem import PlacementProblem
from tests.placement.drawn import traffic_of
from tests.placement.policies.edges import cost_of


def brute_force(demand: Any, slots: tuple[int, ...]) -> float:
    num_experts = demand.shape[1]
    choices = [list(combinations(range(num_experts), min(c, num_experts))) for c in slots]
    best = np.inf
    for held in product(*choices):
        if set().union(*map(set, held)) == set(range(num_experts)):
            local = sum(demand[n, list(mine)].sum() for n, mine in enumerate(held))
            best = min(best, demand.sum() - local)
    return float(best)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    num_experts=st.integers(1, 5),
    slots=st.lists(st.integers(0, 4), min_size=1, max_size=3),
)
def test_the_optimum_is_that_of_trying_everything(
    seed: int, num_experts: int, slots: list[int]
) -> None:
    slots[0] = max(slots[0], num_experts - sum(min(c, num_experts) for c in slots[1:]))
    demand = np.random.default_rng(seed).integers(0, 6, (len(slots), 1, num_experts)).astype(float)
    problem = PlacementProblem(
        traffic=(traffic_of(num_experts, 0),), slots=tuple(slots), demand=demand
    )

    best = remote_calls(optimal(problem), demand)

    assert best == brute_force(demand[:, 0], tuple(slots))
    assert remote_calls(dance(problem), demand) >= best


@settings(deadline=None)
@given(seed=st.integers(0, 10**6), slots=st.lists(st.integers(1, 6), min_size=2, max_size=4))
def test_memory_that_layers_share_never_costs_more_calls(seed: int, slots: list[int]) -> None:
    slots[0] = max(slots[0], 6 - sum(slots[1:]))
    rng = np.random.default_rng(seed)
    demand = rng.integers(0, 6, (len(slots), 3, 6)).astype(float)
    fixed = PlacementProblem(
        traffic=tuple(traffic_of(6, i) for i in range(3)), slots=tuple(slots), demand=demand
    )
    shared = sharing(fixed)

    assert remote_calls(optimal(shared), demand) <= remote_calls(optimal(fixed), demand) + 1e-9
    assert remote_calls(optimal(shared), demand) <= remote_calls(dance(shared), demand) + 1e-9


def sharing(problem: PlacementProblem) -> PlacementProblem:
    """As much memory as the slots have, on one device, for all layers together."""
    memory = tuple((count * len(problem.traffic),) for count in problem.slots)
    everything = (problem.num_experts,) * problem.num_instances
    return replace(problem, slots=everything, memory=memory, expert_bytes=1)


def test_layers_of_even_demand_get_more_slots() -> None:
    demand = np.zeros((2, 2, 8))
    demand[:, 0, 0] = 80  # one expert does all of layer 0
    demand[:, 1] = 10
    problem = PlacementProblem(
        traffic=(traffic_of(8, 0), traffic_of(8, 1)), slots=(6, 6), demand=demand
    )

    placed = dance(sharing(problem))

    used = [sum(len(experts) for experts in layer) for layer in placed]
    assert used[1] > used[0]
    assert used[0] >= 8


def test_calls_are_rows_to_experts_elsewhere_by_their_cost() -> None:
    demand = np.array([[[1.0, 2, 3]], [[10, 20, 30]]])
    problem = PlacementProblem(
        traffic=(traffic_of(3, 0),), slots=(2, 2), demand=demand, remote_cost=np.array([1.0, 0.5])
    )

    assert cost_of([[[0, -1], [1, 2]]], problem) == 10.0
    assert remote_calls([[[0, -1], [1, 2]]], demand) == 15.0
