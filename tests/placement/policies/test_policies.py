import os
import subprocess
import sys
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize

from moesaic.errors import InvalidInput, PlacementInfeasible
from moesaic.messages.placement import EMPTY_SLOT
from moesaic.placement.policies import make_placement
from moesaic.placement.policies.janus import (
    _cheapest_swap,
    janus,
    lower_largest,
    spread,
)
from moesaic.placement.policies.problem import PlacementProblem
from moesaic.placement.policies.replication import Board, replicate
from moesaic.placement.traffic.statistics import LayerTraffic
from moesaic_lab.placement.policies import ALL_POLICIES
from tests.placement.drawn import traffic_of


@st.composite
def problems(draw: st.DrawFn) -> PlacementProblem:
    """Instances of equal and of different sizes, tight and roomy, with and without own demand."""
    num_experts, num_instances = draw(st.integers(1, 10)), draw(st.integers(1, 5))
    num_layers, seed = draw(st.integers(1, 3)), draw(st.integers(0, 10**6))
    size = st.integers(0, num_experts + 2)
    slots = draw(
        st.one_of(
            st.lists(size, min_size=num_instances, max_size=num_instances),
            size.map(lambda count: [count] * num_instances),
        )
    )
    missing = num_experts - sum(min(count, num_experts) for count in slots)
    if missing > 0:
        slots[0] = num_experts
    rng = np.random.default_rng(seed)
    demand = rng.integers(0, 9, (num_instances, num_layers, num_experts)).astype(float)
    return PlacementProblem(
        traffic=tuple(traffic_of(num_experts, seed + i) for i in range(num_layers)),
        slots=tuple(slots),
        statistic=draw(st.sampled_from(["tokens", "batches"])),
        demand=draw(st.sampled_from([None, demand])),
        nodes=draw(st.sampled_from([None, tuple(n % 2 for n in range(num_instances))])),
        num_groups=draw(st.sampled_from([g for g in (1, 2, 4) if num_experts % g == 0])),
    )


@pytest.mark.parametrize("name", ALL_POLICIES)
@settings(max_examples=40, deadline=None)
@given(problem=problems())
def test_every_expert_is_held_and_no_instance_has_too_many(
    name: str, problem: PlacementProblem
) -> None:
    placed = make_placement(name, problem)

    assert len(placed) == len(problem.traffic)
    for layer in placed:
        assert {e for experts in layer for e in experts} - {-1} == set(range(problem.num_experts))
        for experts in layer:
            present = [expert for expert in experts if expert != -1]
            assert len(set(present)) == len(present)
    used = np.array([[len(experts) for experts in layer] for layer in placed])
    assert (used == problem.slots).all()


def test_the_same_problem_has_the_same_answer_in_every_process() -> None:
    source = (
        "import numpy as np\n"
        "from moesaic_lab.placement.policies import ALL_POLICIES\n"
        "from moesaic.placement.policies.problem import PlacementProblem\n"
        "from moesaic.placement.traffic.statistics import LayerTraffic\n"
        "from moesaic.placement.policies.uniform import refill\n"
        "batches = [np.array([[0, 1, 2], [3, 1, 2]]), np.array([[8, 7, 1], [6, 5, 4]])]\n"
        "layers = tuple(LayerTraffic.of_batches(b, 9) for b in (batches, batches[:1]))\n"
        "problem = PlacementProblem(traffic=layers, slots=(4, 4, 5))\n"
        "print({name: policy(problem) for name, policy in ALL_POLICIES.items()})\n"
        "print(refill(9, [[[0, -1, -1, 1], [2, 3, -1, -1], [-1] * 5]]))\n"
    )

    def said(hash_seed: str) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        command = [sys.executable, "-c", source]
        done = subprocess.run(command, env=environment, capture_output=True, check=True, text=True)
        return done.stdout

    assert said("1") == said("2") != ""


@pytest.mark.parametrize("name", ALL_POLICIES)
def test_a_shortfall_is_told_in_slots_and_bytes(name: str) -> None:
    problem = PlacementProblem(traffic=(traffic_of(9, 1),) * 2, slots=(4, 4), expert_bytes=1000)

    with pytest.raises(PlacementInfeasible) as caught:
        make_placement(name, problem)

    assert (caught.value.missing_slots, caught.value.missing_bytes) == (2, 2000)


@pytest.mark.parametrize("name", ALL_POLICIES)
def test_junk_in_counts_does_no_harm(name: str) -> None:
    bad = np.array([np.nan, 1e300, -5.0, np.inf, 1.0])
    square = np.full((5, 5), np.nan, np.float32)
    junk = LayerTraffic(bad, bad, square, 1.0, 1.0, np.zeros((0, 5), bool))

    (layer,) = make_placement(name, PlacementProblem(traffic=(junk,), slots=(3, 3)))

    assert {e for experts in layer for e in experts} - {-1} == set(range(5))


def test_an_unknown_policy_is_refused_with_those_there_are() -> None:
    with pytest.raises(InvalidInput, match="eplb, eplb-batches"):
        make_placement("best", PlacementProblem(traffic=(traffic_of(2, 0),), slots=(2,)))


def test_hot_experts_get_replicas_but_never_two_on_one_instance() -> None:
    assert replicate(np.array([100.0, 8, 4, 1]), [3, 3, 3]).tolist() == [3, 3, 2, 1]
    assert replicate(np.array([100.0, 1]), [4, 4]).tolist() == [2, 2]
    assert replicate(np.zeros(4), [3, 3]).tolist() == [2, 2, 1, 1]


def test_slots_that_nobody_may_take_are_left_empty() -> None:
    placed = janus(PlacementProblem(traffic=(traffic_of(2, 0),), slots=(4, 4)))

    assert sum(experts.count(EMPTY_SLOT) for experts in placed[0]) == 4


@settings(deadline=None)
@given(
    weights=st.lists(st.integers(0, 20), min_size=1, max_size=6),
    slots=st.lists(st.integers(0, 7), min_size=1, max_size=4),
)
def test_replicas_are_as_many_as_fit_and_can_be_placed(
    weights: list[int], slots: list[int]
) -> None:
    num_experts = len(weights)
    room = sum(min(count, num_experts) for count in slots)
    if room < num_experts:
        with pytest.raises(PlacementInfeasible):
            replicate(np.array(weights, float), slots)
        return

    replicas = replicate(np.array(weights, float), slots)

    assert replicas.min() >= 1
    assert replicas.max() <= len(slots)
    assert replicas.sum() <= room
    if len(set(slots)) == 1:
        assert replicas.sum() == room
    board = spread(np.array(weights, float), replicas, np.zeros((num_experts,) * 2), tuple(slots))
    np.testing.assert_array_equal(board.held.sum(axis=1), replicas)


@settings(max_examples=200, deadline=None)
@given(
    num_experts=st.integers(2, 10),
    num_instances=st.integers(2, 5),
    num_slots=st.integers(1, 10),
    seed=st.integers(0, 10**6),
)
def test_with_equal_slots_a_single_swap_always_makes_room(
    num_experts: int, num_instances: int, num_slots: int, seed: int
) -> None:
    num_slots = min(num_slots, num_experts)
    if num_instances * num_slots < num_experts:
        return
    rng = np.random.default_rng(seed)
    weights = rng.random(num_experts) ** 4
    replicas = replicate(weights, [num_slots] * num_instances)
    board = Board(num_experts, [num_slots] * num_instances)
    zeros, none = np.zeros(board.held.shape), np.zeros((num_experts, num_experts))

    for expert in rng.permutation(np.repeat(np.arange(num_experts), replicas)).tolist():
        room = np.flatnonzero((board.free > 0) & ~board.held[expert])
        if len(room):
            board.put(expert, int(rng.choice(room)))  # as badly as may be
            continue
        swap = _cheapest_swap(board, expert, zeros, none)
        assert swap is not None
        board.swap_in(expert, *swap)

    np.testing.assert_array_equal(board.held.sum(axis=1), replicas)
    assert (board.held.sum(axis=0) <= num_slots).all()


def largest_together(held: Any, together: Any) -> float:
    """The largest sum over the pairs of one instance, pair by pair."""
    return max(
        sum(together[i, j] for i, j in combinations(np.flatnonzero(held[:, n]).tolist(), 2))
        for n in range(held.shape[1])
    )


@settings(deadline=None)
@given(problem=problems(), steps=st.integers(0, 20))
def test_the_search_never_raises_the_largest_co_activation(
    problem: PlacementProblem, steps: int
) -> None:
    weights = problem.weights(0)
    replicas = replicate(weights, problem.slots)
    together = problem.traffic[0].coactivation / np.outer(replicas, replicas)
    board = spread(weights, replicas, together, problem.slots)
    before = largest_together(board.held, together)
    room = board.held.sum(axis=0) + board.free

    lower_largest(board, together, steps)

    assert largest_together(board.held, together) <= before * (1 + 1e-9)
    np.testing.assert_array_equal(board.held.sum(axis=1), replicas)
    np.testing.assert_array_equal(board.held.sum(axis=0) + board.free, room)
    assert (board.free >= 0).all()


@settings(deadline=None)
@given(problem=problems())
def test_the_search_ends_where_no_single_swap_or_move_helps(problem: PlacementProblem) -> None:
    weights = problem.weights(0)
    replicas = replicate(weights, problem.slots)
    together = problem.traffic[0].coactivation / np.outer(replicas, replicas)
    board = spread(weights, replicas, together, problem.slots)

    lower_largest(board, together)

    held, largest = board.held, largest_together(board.held, together)
    full = int(np.argmax(0.5 * ((together @ held) * held).sum(axis=0)))
    for other in {*range(held.shape[1])} - {full}:
        leaving = np.flatnonzero(held[:, full] & ~held[:, other]).tolist()
        coming = np.flatnonzero(held[:, other] & ~held[:, full]).tolist()
        for out, back in product(leaving, [*coming, *[None] * bool(board.free[other])]):
            swapped = held.copy()
            swapped[out, [full, other]] = False, True
            if back is not None:
                swapped[back, [full, other]] = True, False
            assert largest_together(swapped, together) >= largest * (1 - 1e-8)


def least_largest(together: Any, replicas: Any, slots: tuple[int, ...]) -> float:
    """The exact optimum of the paper's problem (2), as an integer program."""
    num_experts, num_instances = len(replicas), len(slots)
    pairs = list(combinations(range(num_experts), 2))
    num_x = num_experts * num_instances
    size = num_x + len(pairs) * num_instances + 1  # x, products, the largest load
    rows: list[Any] = []
    low: list[float] = []
    high: list[float] = []

    def constrain(entries: dict[int, float], least: float, most: float) -> None:
        row = np.zeros(size)
        row[list(entries)] = list(entries.values())
        rows.append(row)
        low.append(least)
        high.append(most)

    for e in range(num_experts):
        at = {e * num_instances + g: 1.0 for g in range(num_instances)}
        constrain(at, replicas[e], replicas[e])
    for g in range(num_instances):
        constrain({e * num_instances + g: 1.0 for e in range(num_experts)}, 0, slots[g])
        load: dict[int, float] = {size - 1: -1.0}
        for p, (i, j) in enumerate(pairs):
            z = num_x + p * num_instances + g
            load[z] = together[i, j]
            constrain({i * num_instances + g: 1, j * num_instances + g: 1, z: -1}, -np.inf, 1)
        constrain(load, -np.inf, 0)
    integral = np.zeros(size)
    integral[:num_x] = 1
    found = optimize.milp(
        np.append(np.zeros(size - 1), 1),
        constraints=optimize.LinearConstraint(np.array(rows), low, high),
        integrality=integral,
        bounds=optimize.Bounds(0, np.append(np.ones(size - 1), np.inf)),
    )
    assert found.success
    return float(found.fun)


def test_spreading_comes_close_to_the_exact_optimum() -> None:
    gaps = []
    for seed in range(8):
        traffic, slots = traffic_of(7, seed), (3, 3, 3)
        replicas = replicate(traffic.tokens, slots)
        together = traffic.coactivation / np.outer(replicas, replicas)
        (layer,) = janus(PlacementProblem(traffic=(traffic,), slots=slots))
        held = np.zeros((7, 3), bool)
        for n, experts in enumerate(layer):
            held[experts, n] = True
        best = least_largest(together, replicas, slots)
        found = largest_together(held, together)
        assert found >= best - 1e-6
        gaps.append(found / best - 1)
    assert np.mean(gaps) < 0.1


def test_experts_that_meet_in_batches_are_kept_apart_though_no_row_chooses_both() -> None:
    # Experts 0 and 1 are always active together, in different rows; so are 2 and 3.
    batches = [np.array([[0, 4], [1, 5]]), np.array([[2, 4], [3, 5]])] * 10
    traffic = LayerTraffic.of_batches(batches, 6)
    problem = PlacementProblem(traffic=(traffic,), slots=(3, 3))

    (layer,) = make_placement("janus-batches", problem)

    assert all(len({0, 1} & set(held)) == 1 for held in layer)
    assert all(len({2, 3} & set(held)) == 1 for held in layer)
    assert traffic.coactivation[0, 1] == traffic.coactivation[2, 3] == 0


def test_groups_stay_on_one_node() -> None:
    problem = PlacementProblem(
        traffic=(traffic_of(8, 3),), slots=(3, 3, 3, 3), nodes=(0, 0, 1, 1), num_groups=4
    )

    (layer,) = make_placement("eplb", problem)

    for group in range(4):
        experts = {2 * group, 2 * group + 1}
        nodes = {problem.nodes[n] for n, held in enumerate(layer) if experts & set(held)}  # type: ignore[index]
        assert len(nodes) == 1


def test_rows_are_balanced_by_those_that_balance_rows() -> None:
    traffic = traffic_of(12, 5, num_batches=20)
    problem = PlacementProblem(traffic=(traffic,), slots=(5, 5, 5))

    def heaviest(name: str) -> float:
        (layer,) = make_placement(name, problem)
        held = np.zeros((12, 3), bool)
        for n, experts in enumerate(layer):
            held[[e for e in experts if e >= 0], n] = True
        return float(((traffic.tokens / held.sum(axis=1)) @ held).max())

    even = traffic.tokens.sum() / 3
    assert heaviest("eplb") < 1.05 * even
    assert heaviest("smartmoe") < 1.05 * even
    assert heaviest("uniform") > 1.2 * even


@pytest.mark.parametrize("name", ALL_POLICIES)
def test_traffic_that_has_faded_places_as_it_did(name: str) -> None:
    traffic = tuple(traffic_of(12, seed) for seed in (3, 4))
    faded = tuple(layer.decayed(2.0**-40) for layer in traffic)

    then = make_placement(name, PlacementProblem(traffic=faded, slots=(5, 5, 5)))

    assert then == make_placement(name, PlacementProblem(traffic=traffic, slots=(5, 5, 5)))


@pytest.mark.parametrize("name", ALL_POLICIES)
@pytest.mark.parametrize("slots", [(8,), (9,), (1,) * 8, (1,) * 12, (4, 4), (0, 8, 3)])
def test_without_any_traffic_experts_are_placed_all_the_same(
    name: str, slots: tuple[int, ...]
) -> None:
    (layer,) = make_placement(name, PlacementProblem(traffic=(LayerTraffic.none(8),), slots=slots))

    assert {e for held in layer for e in held} - {-1} == set(range(8))
    for held in layer:
        present = [expert for expert in held if expert != -1]
        assert len(present) == len(set(present))
