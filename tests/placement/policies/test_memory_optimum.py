"""The optimum where instances have memory, beside trying everything and the linear program."""

from dataclasses import replace
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from moesaic.placement.policies import make_placement
from moesaic.placement.policies.linear import relaxed
from moesaic.placement.policies.optimal import KEPT_WORTH, optimal, optimal_with_gap
from moesaic.placement.policies.problem import PlacementProblem
from moesaic_lab.placement.policies import ALL_POLICIES
from tests.placement.drawn import traffic_of
from tests.placement.policies.edges import cost_of, edges, has_room, require_sound


@settings(max_examples=50, deadline=None)
@given(problem=edges())
def test_no_policy_has_less_remote_cost_than_the_optimal(problem: PlacementProblem) -> None:
    assume(has_room(problem))

    placed, gap = optimal_with_gap(problem)

    cost = cost_of(placed, problem)
    for name in ALL_POLICIES:
        other = cost_of(make_placement(name, problem), problem)
        assert cost <= other * (1 + 1e-9) + 1e-9
        assert cost * (1 - gap) <= other + 1e-6  # the bound holds for all


def least_cost(problem: PlacementProblem) -> float:
    """The optimum, by trying every set of experts that fits on each instance."""
    assert problem.memory is not None
    num_layers, num_experts = len(problem.traffic), problem.num_experts
    items = list(product(range(num_layers), range(num_experts)))
    demand = [problem.demand_of(layer_idx) for layer_idx in range(num_layers)]
    reached = {frozenset[Any](): 0.0}  # experts covered so far: most demand that is local
    for n, devices in enumerate(problem.memory):
        choices = []
        for size in range(len(items) + 1):
            for chosen in combinations(items, size):
                counts = [sum(layer == each for layer, _ in chosen) for each in range(num_layers)]
                if max(counts, default=0) <= problem.slots[n] and packs(counts, problem, devices):
                    saved = sum(demand[layer][n, expert] for layer, expert in chosen)
                    choices.append((frozenset(chosen), saved))
        following: dict[Any, float] = {}
        for (covered, saved), (mine, more) in product(reached.items(), choices):
            key = covered | mine
            following[key] = max(following.get(key, -1.0), saved + more)
        reached = following
    best = reached.get(frozenset(items))
    return np.inf if best is None else float(sum(layer.sum() for layer in demand) - best)


def packs(counts: list[int], problem: PlacementProblem, devices: tuple[int, ...]) -> bool:
    """True if some order of packing finds a place for all."""
    sizes = [size for size, count in zip(problem.sizes, counts, strict=True) for _ in range(count)]
    states = {devices}
    for size in sizes:
        states = {
            tuple(sorted((*free[:d], free[d] - size, *free[d + 1 :])))
            for free in states
            for d in range(len(free))
            if free[d] >= size
        }
    return bool(states)


@settings(max_examples=40, deadline=None)
@given(problem=edges(most_experts=3, most_layers=2))
def test_the_optimum_is_that_of_trying_everything(problem: PlacementProblem) -> None:
    best = least_cost(problem)
    if not has_room(problem):
        assert best == np.inf or len(set(problem.sizes)) > 1
        return

    placed, gap = optimal_with_gap(problem)

    cost = cost_of(placed, problem)
    assert best - 1e-6 <= cost
    assert cost * (1 - gap) <= best + 1e-6
    if len(set(problem.sizes)) == 1:
        assert gap == 0
        assert cost == pytest.approx(best, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_with_experts_of_one_size_the_optimum_is_that_of_the_linear_program(seed: int) -> None:
    rng = np.random.default_rng(seed)
    demand = rng.gamma(0.3, size=(5, 7, 12))
    memory = tuple((int(rng.integers(12, 25)) * 100 + 99,) for _ in range(5))
    problem = PlacementProblem(
        traffic=(traffic_of(12, seed),) * 7,
        slots=(12,) * 5,
        demand=demand,
        memory=tuple((*devices, 250) for devices in memory),
        expert_bytes=100,
    )

    placed, gap = optimal_with_gap(problem)

    budget = np.array([devices[0] // 100 + 2 for devices in memory])
    parts = relaxed(demand.transpose(1, 0, 2), budget, np.ones(7))
    assert gap == 0
    assert cost_of(placed, problem) == pytest.approx(
        (demand.transpose(1, 0, 2) * (1 - parts)).sum()
    )


def test_experts_of_unequal_size_come_close_to_the_bound() -> None:
    rng = np.random.default_rng(0)
    problem = PlacementProblem(
        traffic=(traffic_of(32, 0),) * 9,
        slots=(32,) * 3,
        demand=rng.gamma(0.3, size=(3, 9, 32)),
        layer_bytes=(8, 11, 14) * 3,
        memory=((1300,), (1300,), (1300, 700)),
    )

    placed, gap = optimal_with_gap(problem)

    require_sound(problem, placed)
    assert 0 <= gap < 0.03


def test_what_is_held_stays_where_that_costs_nothing() -> None:
    problem = PlacementProblem(
        traffic=(traffic_of(8, 0),) * 3,
        slots=(8,) * 3,
        demand=np.ones((3, 3, 8)),
        memory=((1200,), (1200,), (1200,)),
        expert_bytes=100,
    )
    rng = np.random.default_rng(0)
    held = [
        [sorted(mine.tolist()) for mine in np.split(rng.permutation(8), [3, 6])] for _ in range(3)
    ]

    placed = optimal(replace(problem, held=held))

    for layer, before in zip(placed, held, strict=True):
        for mine, mine_before in zip(layer, before, strict=True):
            assert set(mine_before) <= set(mine)
    again = optimal(replace(problem, held=placed))
    assert again == placed


@settings(max_examples=40, deadline=None)
@given(problem=edges(sizes=((10,),)), other=st.integers(0, 10**6))
def test_what_is_held_costs_next_to_nothing_and_is_kept_after_small_changes(
    problem: PlacementProblem, other: int
) -> None:
    assume(has_room(problem))
    placed = optimal(problem)
    shape = problem.num_instances, len(placed), problem.num_experts
    changed = replace(problem, demand=np.random.default_rng(other).random(shape))

    kept = optimal(replace(changed, held=placed))

    best = cost_of(optimal(changed), changed)
    allowed = KEPT_WORTH * sum(changed.demand_of(i).sum() for i in range(len(placed)))
    assert cost_of(kept, changed) <= best + allowed + 1e-9
    assert optimal(replace(problem, held=placed)) == placed
