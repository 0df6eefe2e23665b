"""Every policy where instances have memory, on devices, for experts of equal and unequal size."""

from dataclasses import replace
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from moesaic.errors import InvalidInput, PlacementInfeasible
from moesaic.placement.policies import POLICIES, make_placement
from moesaic.placement.policies.dance import layer_counts
from moesaic.placement.policies.linear import relaxed
from moesaic.placement.policies.optimal import KEPT_WORTH, optimal, optimal_with_gap
from moesaic.placement.policies.packing import fitted, pack_devices
from moesaic.placement.policies.problem import PlacementProblem
from moesaic.placement.policies.remote_calls import predicted_cost
from moesaic.placement.policies.room import even_shares
from tests.placement.drawn import traffic_of


@st.composite
def edges(
    draw: st.DrawFn,
    most_experts: int = 7,
    most_layers: int = 4,
    sizes: tuple[tuple[int, ...], ...] = ((10,), (8, 11), (5, 12, 30)),
) -> PlacementProblem:
    """Servers with none to three devices; tight and roomy, limited per layer, silent, too small."""
    num_experts, num_instances = draw(st.integers(1, most_experts)), draw(st.integers(1, 4))
    num_layers, seed = draw(st.integers(1, most_layers)), draw(st.integers(0, 10**6))
    rng = np.random.default_rng(seed)
    layer_bytes = tuple(rng.choice(draw(st.sampled_from(sizes)), num_layers).tolist())
    needed = num_experts * sum(layer_bytes)
    roomy = draw(st.sampled_from([0.8, 1.0, 1.2, 2.0]))
    devices = [int(count) for count in rng.integers(0, 4, num_instances)]
    devices[0] += 1
    parts = rng.multinomial(int(needed * roomy), rng.dirichlet(np.ones(sum(devices))))
    memory = np.split(parts, np.cumsum(devices)[:-1])
    demand = rng.integers(0, 9, (num_instances, num_layers, num_experts)).astype(float)
    demand[rng.random(num_instances) < 0.2] = 0
    slots = draw(st.sampled_from([num_experts, num_experts + 3, max(1, num_experts - 2)]))
    return PlacementProblem(
        traffic=tuple(traffic_of(num_experts, seed + i) for i in range(num_layers)),
        slots=(slots,) * num_instances,
        demand=draw(st.sampled_from([None, demand])),
        remote_cost=draw(st.sampled_from([None, rng.random(num_instances)])),
        layer_bytes=layer_bytes,
        memory=tuple(tuple(int(size) for size in mine) for mine in memory),
    )


def has_room(problem: PlacementProblem) -> bool:
    try:
        even_shares(problem)
    except PlacementInfeasible:
        return False
    return True


def require_sound(problem: PlacementProblem, placed: Any) -> None:
    """Every expert is held, none twice, no layer is over its limit and no device over its memory."""
    assert problem.memory is not None
    chosen = pack_devices(placed, problem)
    used = [[0] * len(devices) for devices in problem.memory]
    assert len(placed) == len(problem.traffic)
    for layer, places, size in zip(placed, chosen, problem.sizes, strict=True):
        assert {e for mine in layer for e in mine} - {-1} == set(range(problem.num_experts))
        for n, (experts, devices) in enumerate(zip(layer, places, strict=True)):
            present = [expert for expert in experts if expert != -1]
            assert len(set(present)) == len(present)
            assert len(experts) <= problem.slots[n]
            assert [device == -1 for device in devices] == [expert == -1 for expert in experts]
            for device in devices:
                if device != -1:
                    used[n][device] += size
    for mine, limits in zip(used, problem.memory, strict=True):
        assert all(taken <= size for taken, size in zip(mine, limits, strict=True))


@pytest.mark.parametrize("name", POLICIES)
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


@settings(max_examples=50, deadline=None)
@given(problem=edges())
def test_no_policy_has_less_remote_cost_than_the_optimal(problem: PlacementProblem) -> None:
    assume(has_room(problem))

    placed, gap = optimal_with_gap(problem)

    cost = float(predicted_cost(placed, problem).sum())
    for name in POLICIES:
        other = float(predicted_cost(make_placement(name, problem), problem).sum())
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

    cost = float(predicted_cost(placed, problem).sum())
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
    assert predicted_cost(placed, problem).sum() == pytest.approx(
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


@pytest.mark.parametrize("name", POLICIES)
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

    best = predicted_cost(optimal(changed), changed).sum()
    allowed = KEPT_WORTH * sum(changed.demand_of(i).sum() for i in range(len(placed)))
    assert predicted_cost(kept, changed).sum() <= best + allowed + 1e-9
    assert optimal(replace(problem, held=placed)) == placed


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
