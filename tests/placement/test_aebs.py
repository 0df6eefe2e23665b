from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import optimize

from moesaic.placement.schedule.aebs import (
    NONE,
    UNAVAILABLE,
    Costs,
    expert_tokens,
    replica_table,
    schedule_experts,
)
from moesaic_lab.scheduling.optimal import optimal_instances


@dataclass(frozen=True)
class Batch:
    """One batch of one layer, with what its schedule depends on."""

    topk_ids: NDArray[np.int32]
    replicas: NDArray[np.int32]
    live: NDArray[np.bool_]
    load: NDArray[np.int64]
    costs: Costs[NDArray[np.int64]]

    @property
    def circumstances(self) -> dict[str, Any]:
        """The keyword arguments of ``schedule_experts``."""
        return {"live": self.live, "load": self.load, "costs": self.costs}


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Ties, dead instances, experts that nobody holds and ids that are none are all common."""
    num_instances, num_experts = draw(st.integers(1, 5)), draw(st.integers(1, 7))
    small = st.integers(0, 4)

    def per_instance(values: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(values, min_size=num_instances, max_size=num_instances))

    slots = per_instance(st.lists(st.integers(-1, num_experts - 1), max_size=6))
    num_rows, top_k = draw(st.integers(0, 6)), draw(st.integers(1, 3))
    ids = draw(
        st.lists(st.integers(-1, num_experts), min_size=num_rows * top_k, max_size=num_rows * top_k)
    )
    return Batch(
        np.array(ids, np.int32).reshape(num_rows, top_k),
        replica_table(slots, num_experts),
        np.array(per_instance(st.sampled_from([True, True, True, False]))),
        np.array(per_instance(small), np.int64),
        Costs(np.array(per_instance(small), np.int64), np.array(per_instance(small), np.int64)),
    )


def test_replicas_are_numbered_slot_by_slot() -> None:
    table = replica_table([[2, -1, 0], [], [0, 0]], 3)

    assert table.tolist() == [[2, -1, 3], [-1, -1, -1], [0, -1, -1]]


@given(batches())
def test_every_activated_expert_has_one_live_replica_if_there_is_any(batch: Batch) -> None:
    schedule = schedule_experts(batch.topk_ids, batch.replicas, **batch.circumstances)

    tokens = expert_tokens(batch.topk_ids, len(batch.replicas))
    for expert, (row, instance, replica) in enumerate(
        zip(batch.replicas, schedule.instance, schedule.replica, strict=True)
    ):
        holders = np.flatnonzero((row >= 0) & batch.live)
        if tokens[expert] == 0:
            assert (instance, replica) == (NONE, NONE)
        elif len(holders) == 0:
            assert (instance, replica) == (UNAVAILABLE, NONE)
        else:
            assert instance in holders
            assert replica == row[instance]


@given(batches())
def test_every_choice_goes_to_the_replica_of_its_expert(batch: Batch) -> None:
    schedule = schedule_experts(batch.topk_ids, batch.replicas, **batch.circumstances)

    assert schedule.replica_of_choice.shape == batch.topk_ids.shape
    for expert, replica in zip(batch.topk_ids.flat, schedule.replica_of_choice.flat, strict=True):
        known = 0 <= expert < len(batch.replicas)
        assert replica == (schedule.replica[expert] if known else NONE)


@given(batches())
def test_the_load_is_what_was_carried_over_and_what_is_assigned(batch: Batch) -> None:
    schedule = schedule_experts(batch.topk_ids, batch.replicas, **batch.circumstances)

    expected = batch.load.copy()
    for expert, count in enumerate(expert_tokens(batch.topk_ids, len(batch.replicas))):
        if (n := schedule.instance[expert]) >= 0:
            expected[n] += max(batch.costs.weights[n], count * batch.costs.row[n])
    np.testing.assert_array_equal(schedule.load, expected)


@given(batches(), st.integers(0, 99))
def test_the_order_of_rows_and_of_choices_does_not_matter(batch: Batch, seed: int) -> None:
    rng = np.random.default_rng(seed)
    shuffled = rng.permutation(batch.topk_ids.flatten()).reshape(batch.topk_ids.shape)

    one = schedule_experts(batch.topk_ids, batch.replicas, **batch.circumstances)
    other = schedule_experts(shuffled, batch.replicas, **batch.circumstances)

    np.testing.assert_array_equal(one.instance, other.instance)
    np.testing.assert_array_equal(one.load, other.load)


@given(batches(), st.integers(1, 3))
def test_where_experts_cost_the_same_the_largest_load_is_the_least_possible(
    batch: Batch, price: int
) -> None:
    experts, num_instances = batch.replicas.shape
    costs = Costs(np.full(num_instances, price), np.zeros(num_instances, np.int64))

    schedule = schedule_experts(
        batch.topk_ids, batch.replicas, live=batch.live, load=batch.load, costs=costs
    )

    activated = expert_tokens(batch.topk_ids, experts) > 0
    holders = [np.flatnonzero((row >= 0) & batch.live).tolist() for row in batch.replicas]
    choices = [h for h, active in zip(holders, activated, strict=True) if active and h]
    least = min(
        (batch.load + price * np.bincount(tried, minlength=num_instances)).max(
            where=batch.live, initial=0
        )
        for tried in (np.array(t, np.int64) for t in product(*choices))
    )
    assert schedule.load.max(where=batch.live, initial=0) == least


@given(batches())
def test_the_optimum_is_what_trying_everything_finds(batch: Batch) -> None:
    num_instances = batch.replicas.shape[1]
    activated = expert_tokens(batch.topk_ids, len(batch.replicas)) > 0

    best = optimal_instances(activated, batch.replicas, live=batch.live, load=batch.load)

    holders = [np.flatnonzero((row >= 0) & batch.live).tolist() for row in batch.replicas]
    for expert, instance in enumerate(best):
        if not activated[expert]:
            assert instance == NONE
        else:
            assert instance in (holders[expert] or [UNAVAILABLE])
    choices = [h for h, active in zip(holders, activated, strict=True) if active and h]
    everything = (
        sorted(batch.load + np.bincount(tried, minlength=num_instances), reverse=True)
        for tried in (np.array(t, np.int64) for t in product(*choices))
    )
    found = batch.load + np.bincount(best[best >= 0], minlength=num_instances)
    assert sorted(found, reverse=True) == min(everything)


@pytest.mark.parametrize("seed", range(6))
def test_the_optimum_is_that_of_a_solver(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_experts, num_instances = 60, 8
    replicas = np.where(rng.random((num_experts, num_instances)) < 0.2, 1, NONE).astype(np.int32)
    replicas[np.arange(num_experts), rng.integers(0, num_instances // 2, num_experts)] = 1
    activated = rng.random(num_experts) < 0.7

    best = optimal_instances(activated, replicas)

    experts, instances = np.nonzero((replicas >= 0) & activated[:, None])
    pairs = np.arange(len(experts))
    chosen = np.zeros((num_experts, len(pairs) + 1))
    chosen[experts, pairs] = 1
    loads = np.zeros((num_instances, len(pairs) + 1))
    loads[instances, pairs] = 1
    loads[:, -1] = -1  # the last variable is the largest load
    solved = optimize.milp(
        np.append(np.zeros(len(pairs)), 1),
        constraints=[
            optimize.LinearConstraint(chosen, activated, activated),
            optimize.LinearConstraint(loads, ub=0),
        ],
        integrality=np.ones(len(pairs) + 1),
        bounds=optimize.Bounds(0, np.append(np.ones(len(pairs)), np.inf)),
    )
    assert np.bincount(best[best >= 0]).max() == round(solved.fun)


def test_fewest_choices_go_first() -> None:
    # Expert 0 may go anywhere, expert 1 only to one of two: whoever has most choices waits.
    replicas = replica_table([[0, 1], [0, 1], [0]], 2)
    topk_ids = np.array([[0, 1]])

    ours = schedule_experts(topk_ids, replicas)

    assert ours.instance.tolist() == [1, 0]


def test_what_is_carried_over_turns_a_batch_to_others() -> None:
    replicas = replica_table([[0], [0]], 1)

    schedule = schedule_experts(np.array([[0]]), replicas, load=[1, 0])

    assert schedule.instance.tolist() == [1]
    assert schedule.load.tolist() == [1, 1]


def test_above_the_ridge_rows_count_and_below_it_only_weights() -> None:
    # Expert 0 sits on instance 0 alone, expert 1 on instance 1 alone, expert 2 on both.
    replicas = replica_table([[0, 2], [1, 2]], 3)
    topk_ids = np.array([[0]] * 9 + [[1]] + [[2]])

    def instance_of_2(row: int) -> int:
        costs = Costs(np.full(2, 10), np.full(2, row))
        return int(schedule_experts(topk_ids, replicas, costs=costs).instance[2])

    assert instance_of_2(1) == 0  # 9 rows take no longer than the weights: a tie
    assert instance_of_2(2) == 1


def test_a_slower_instance_gets_less() -> None:
    replicas = replica_table([list(range(6)), list(range(6))], 6)

    schedule = schedule_experts(
        np.arange(6)[None], replicas, costs=Costs(np.array([2, 1]), np.zeros(2, np.int64))
    )

    assert np.bincount(schedule.instance).tolist() == [2, 4]


def test_an_activated_expert_without_a_live_replica_is_told_from_one_that_is_not_activated() -> (
    None
):
    replicas = replica_table([[0, 1], [1]], 4)

    schedule = schedule_experts(np.array([[0, 1], [0, 2]]), replicas, live=[False, True])

    assert schedule.instance.tolist() == [UNAVAILABLE, 1, UNAVAILABLE, NONE]
