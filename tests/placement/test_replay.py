from itertools import permutations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.placement.evaluation.replay import activated_counts, replay
from moesaic.placement.evaluation.stability import _best_match, loads, settle
from moesaic.placement.schedule.aebs import replica_table
from moesaic.placement.schedule.serving import activated_experts
from moesaic_lab.scheduling.policies import aebs


@settings(deadline=None)
@given(
    size=st.integers(1, 5),
    seed=st.integers(0, 10**6),
    most=st.integers(1, 8),
)
def test_the_match_is_the_cheapest(size: int, seed: int, most: int) -> None:
    cost = np.random.default_rng(seed).integers(-most, most, (size, size)).astype(float)

    columns = _best_match(cost)

    assert sorted(columns) == list(range(size))
    found = cost[np.arange(size), columns].sum()
    assert found == min(cost[np.arange(size), list(p)].sum() for p in permutations(range(size)))


@st.composite
def placements(draw: st.DrawFn) -> list[list[int]]:
    return [
        [*draw(st.lists(st.integers(0, 7), unique=True, min_size=n, max_size=n)), *[-1] * (4 - n)]
        for n in draw(st.lists(st.integers(0, 4), min_size=3, max_size=3))
    ]


@settings(deadline=None)
@given(current=placements(), wanted=placements())
def test_the_same_sets_end_up_somewhere_with_the_fewest_loads(
    current: list[list[int]], wanted: list[list[int]]
) -> None:
    (settled,) = settle([current], [wanted])

    assert sorted(map(sorted, settled)) == sorted(map(sorted, wanted))
    fewest = min(loads([current], [list(order)]) for order in permutations(wanted))
    assert loads([current], [settled]) == fewest
    for now, then in zip(current, settled, strict=True):
        for slot, expert in enumerate(now):
            if expert != -1 and expert in then:
                assert then[slot] == expert


def test_instances_that_are_not_alike_keep_their_sets() -> None:
    current, wanted = [[0, 1], [2, 3]], [[2, 3], [0, 1]]

    assert settle([current], [wanted]) == [current]
    assert settle([current], [wanted], alike=["here", "there"]) == [wanted]


def test_instances_with_different_slots_are_not_alike() -> None:
    assert settle([[[0, 1], [2]]], [[[2, -1], [0]]]) == [[[2, -1], [0]]]


def test_a_newcomer_loads_everything_it_gets() -> None:
    (settled,) = settle([[[0, 1], []]], [[[1, 2], [0, 2]]])

    assert loads([[[0, 1], []]], [settled]) == 3


def test_a_replay_counts_what_the_fullest_instance_has() -> None:
    placed = [[[0, 1, 2], [2, 3]]]
    batches = [np.array([[5, 1, 1, 0], [0, 0, 2, 1]])]

    (found,) = replay([placed], batches)

    assert (found.max_activated, found.spread, found.activated) == (1.5, 0.5, 2.5)
    assert (found.max_load, found.batches) == (1.5, 2)
    assert replay([placed], [np.zeros((0, 4), np.uint16)])[0].batches == 0


def test_above_the_ridge_a_replay_balances_rows_as_workers_do() -> None:
    # Expert 0 has most rows: by experts two each are even, by rows the second takes all others.
    placed, batches = [[[0, 1, 2], [1, 2, 3]]], [np.array([[8, 1, 1, 1]])]

    (counted,) = replay([placed], batches)
    (reckoned,) = replay([placed], batches, "aebs", ridges=[1, 1])
    (unknown,) = replay([placed], batches, "aebs", ridges=[1, 0])

    assert (counted.max_activated, counted.max_load) == (2, 2)
    assert (reckoned.max_activated, reckoned.max_load) == (3, 8)
    assert unknown == counted


def test_of_a_static_schedule_a_replay_takes_no_other_replica() -> None:
    placed = [[[0, 1], [0, 1], [2, 3]]]  # one each, of 0 and 1, whatever the batch
    batches = [np.array([[1, 1, 0, 0], [1, 0, 0, 0]])]

    assert replay([placed], batches, "static")[0].max_activated == 1


def test_all_placements_are_replayed_on_the_same_batches_the_latest_first() -> None:
    one, other = [[[0, 1], [2]], [[0], [1, 2]]], [[[0], [1, 2]], [[0], [1, 2]]]
    batches = [np.array([[9, 9, 9], [1, 0, 0]]), np.array([[9, 9, 9], [1, 1, 0]])]
    may = iter([True, True, False])

    found = replay([one, other], batches, go_on=lambda: next(may))

    assert [each.batches for each in found] == [2, 2]
    assert [each.activated for each in found] == [1.5, 1.5]  # not the nines, which are older


def test_counts_are_those_of_scheduling_the_rows() -> None:
    rng = np.random.default_rng(0)
    replicas = replica_table([[0, 1, 2, 3, 4], [3, 4, 5, 6, 7], [0, 2, 4, 6, 8]], 9)
    for _ in range(20):
        topk_ids = rng.integers(0, 9, (6, 2))
        served = aebs(topk_ids, replicas, rng)
        expected = activated_experts(topk_ids, served, 9, 3)
        found, load = activated_counts(np.isin(np.arange(9), topk_ids), replicas)
        np.testing.assert_array_equal(found, expected)
        np.testing.assert_array_equal(load, expected)
