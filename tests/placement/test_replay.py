from itertools import permutations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.placement.aebs import replica_table
from moesaic.placement.problem import Problem
from moesaic.placement.replay import aebs_counts, choose_policy, replay
from moesaic.placement.replica_choices import activated_experts, aebs
from moesaic.placement.stability import _best_match, loads, settle
from moesaic.placement.statistics import LayerTraffic


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
    batches = [np.array([[1, 1, 1, 0], [0, 0, 1, 1]], bool)]

    found = replay(placed, batches)

    assert (found.max_activated, found.spread, found.activated) == (1.5, 0.5, 2.5)
    assert replay(placed, [np.zeros((0, 4), bool)]).batches == 0


def test_counts_are_those_of_scheduling_the_rows() -> None:
    rng = np.random.default_rng(0)
    replicas = replica_table([[0, 1, 2, 3, 4], [3, 4, 5, 6, 7], [0, 2, 4, 6, 8]], 9)
    for _ in range(20):
        topk_ids = rng.integers(0, 9, (6, 2))
        mask = np.isin(np.arange(9), topk_ids)
        served = aebs(topk_ids, replicas, rng)
        expected = activated_experts(topk_ids, served, 9, 3)
        np.testing.assert_array_equal(aebs_counts(mask, replicas), expected)


def skewed(num_batches: int = 40) -> LayerTraffic:
    rng = np.random.default_rng(1)
    scores = np.linspace(3, 0, 8) + rng.gumbel(size=(num_batches * 3, 8))
    rows = np.argsort(-scores, axis=1)[:, :2]
    return LayerTraffic.of_batches(np.split(rows, num_batches), 8)


def test_the_best_placement_is_chosen_with_what_it_should_bring() -> None:
    problem = Problem(traffic=(skewed(),), slots=(4, 4, 4), expert_bytes=10)
    lopsided = [[[0, 1, 2, 3], [4, 5, 6, 7], [4, 5, 6, 7]]]

    choice = choose_policy(problem, lopsided, ("uniform", "eplb", "janus"))

    assert choice.policy in ("eplb", "janus")
    assert choice.gain > 0.2
    assert choice.after.max_activated == min(choice.tried.values())
    assert choice.after.batches == 20  # the other half is what policies see
    assert choice.load_bytes == 10 * choice.loads == 10 * loads(lopsided, choice.slots)


def test_what_is_there_stays_where_nothing_is_better() -> None:
    problem = Problem(traffic=(skewed(),), slots=(4, 4, 4))
    best = choose_policy(problem, [[[0, 1, 2, 3], [4, 5, 6, 7], []]], ("eplb", "janus"))

    again = choose_policy(problem, best.slots, (best.policy,))

    assert (again.policy, again.loads, again.gain) == ("", 0, 0)


def test_without_traffic_nothing_is_moved() -> None:
    problem = Problem(traffic=(LayerTraffic.none(4),), slots=(2, 2))

    choice = choose_policy(problem, [[[3, 2], [1, 0]]])

    assert (choice.policy, choice.slots) == ("", [[[3, 2], [1, 0]]])


def test_a_policy_that_fails_is_named() -> None:
    problem = Problem(traffic=(skewed(),), slots=(2, 2))

    choice = choose_policy(problem, [[[0, 1], [2, 3]]], ("janus", "eplb"))

    assert set(choice.failed) == {"janus", "eplb"}
    assert choice.policy == ""
