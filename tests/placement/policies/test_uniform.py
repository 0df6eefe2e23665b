from collections import Counter

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from moesaic.errors import PlacementInfeasible
from moesaic.placement.policies.uniform import refill, uniform

experts = st.integers(1, 40)
capacities = st.lists(st.integers(0, 50), min_size=1, max_size=8)
scarce = st.lists(st.integers(0, 15), min_size=1, max_size=6)  # not enough for many experts


def room(num_experts: int, slots: list[int]) -> int:
    return sum(min(num_slots, num_experts) for num_slots in slots)


def check(layer: list[list[int]], num_experts: int, slots: list[int]) -> Counter[int]:
    """What holds of every complete layer; returns the replicas of each expert."""
    assert [len(worker) for worker in layer] == slots
    for worker in layer:
        held = [expert for expert in worker if expert != -1]
        assert len(held) == len(set(held)) == min(len(worker), num_experts)
    replicas = Counter(expert for worker in layer for expert in worker if expert != -1)
    assert set(replicas) == set(range(num_experts))
    return replicas


@given(experts, st.integers(1, 4), capacities)
def test_every_expert_is_placed_and_replicas_differ_by_at_most_one(num_experts, num_layers, slots):
    assume(room(num_experts, slots) >= num_experts)

    placed = uniform(num_experts, num_layers, slots)

    assert len(placed) == num_layers
    for layer in placed:
        replicas = check(layer, num_experts, slots)
        assert max(replicas.values()) - min(replicas.values()) <= 1
    assert placed == uniform(num_experts, num_layers, slots)


@given(experts, st.integers(1, 4), scarce)
def test_too_few_slots_are_refused_with_the_shortfall(num_experts, num_layers, slots):
    missing = num_experts - room(num_experts, slots)
    assume(missing > 0)

    with pytest.raises(PlacementInfeasible) as refused:
        uniform(num_experts, num_layers, slots)
    assert refused.value.missing_slots == missing * num_layers
    with pytest.raises(PlacementInfeasible):
        refill(num_experts, [[[-1] * n for n in slots] for _ in range(num_layers)])


@given(experts, capacities, st.data())
def test_refill_completes_what_survivors_hold_and_moves_only_what_it_must(num_experts, slots, data):
    assume(room(num_experts, slots) >= num_experts)
    (before,) = uniform(num_experts, 1, slots)
    lost = data.draw(st.sets(st.integers(0, len(slots) - 1)))
    held = [[-1] * len(worker) if n in lost else worker for n, worker in enumerate(before)]

    (after,) = refill(num_experts, [held])

    check(after, num_experts, slots)
    nobody_holds = num_experts - len({e for worker in held for e in worker} - {-1})
    moved = sum(
        old not in (-1, new)
        for worker, filled in zip(held, after, strict=True)
        for old, new in zip(worker, filled, strict=True)
    )
    assert moved <= nobody_holds


def test_a_newcomer_takes_the_least_replicated_experts():
    (layer,) = refill(4, [[[0, 1, 2, 3], [0, 1], [-1, -1]]])

    assert layer == [[0, 1, 2, 3], [0, 1], [2, 3]]


def test_a_lost_expert_takes_the_place_of_a_replica_if_no_slot_is_empty():
    (layer,) = refill(4, [[[0, 1, 2], [0, 1, 2]]])

    assert sorted(check(layer, 4, [3, 3]).values()) == [1, 1, 2, 2]
    assert sum(old != new for worker in layer for old, new in enumerate(worker)) == 1
