import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.placement.schedule.aebs import replica_table
from moesaic.placement.schedule.serving import activated_experts
from moesaic_lab.scheduling.policies import (
    SCHEDULES,
    fewest_first,
    first,
    id_order,
    metro,
    random_per_expert,
    token_balanced,
)

cases = st.tuples(st.integers(1, 6), st.integers(1, 12), st.integers(1, 8), st.integers(0, 10**6))


@pytest.mark.parametrize("name", SCHEDULES)
@given(case=cases)
def test_every_policy_serves_every_choice_by_a_holder(
    name: str, case: tuple[int, int, int, int]
) -> None:
    instances, experts, rows, seed = case
    rng = np.random.default_rng(seed)
    replicas = np.where(rng.random((experts, instances)) < 0.4, 0, -1).astype(np.int32)
    replicas[np.arange(experts), rng.integers(0, instances, experts)] = 0
    topk_ids = rng.integers(0, experts, (rows, 2))

    served = SCHEDULES[name](topk_ids, replicas, rng)

    assert served.shape == topk_ids.shape
    assert (replicas[topk_ids, served] >= 0).all()
    counts = activated_experts(topk_ids, served, experts, instances)
    least = activated_experts(
        topk_ids, SCHEDULES["optimum"](topk_ids, replicas, rng), experts, instances
    ).max()
    if name in ("fewest_first", "id_order"):  # Azar, Naor, Rom: on-line assignments
        assert counts.max() <= least * (math.ceil(math.log2(instances)) + 1)
    for best in ("optimum", "aebs"):  # which are as good as each other
        others = SCHEDULES[best](topk_ids, replicas, rng)
        assert counts.max() >= activated_experts(topk_ids, others, experts, instances).max()


EVERYWHERE = replica_table([[0, 1], [0, 1]], 2)
RNG = np.random.default_rng(0)


def test_balancing_tokens_activates_an_expert_on_all_its_instances() -> None:
    topk_ids = np.array([[0], [0], [1], [1]])

    served = token_balanced(topk_ids, EVERYWHERE, RNG)

    assert activated_experts(topk_ids, served, 2, 2).tolist() == [2, 2]
    assert np.bincount(served.flatten()).tolist() == [2, 2]


def test_balancing_experts_activates_each_once() -> None:
    topk_ids = np.array([[0], [0], [1], [1]])

    served = metro(topk_ids, EVERYWHERE, RNG)

    assert activated_experts(topk_ids, served, 2, 2).tolist() == [1, 1]


def test_the_first_holder_is_the_lowest() -> None:
    assert set(first(np.array([[0, 1]]), EVERYWHERE, RNG).flatten()) == {0}


def test_all_rows_of_an_expert_draw_the_same_replica() -> None:
    served = random_per_expert(np.zeros((50, 1), np.int64), EVERYWHERE, RNG)

    assert len(set(served.flatten())) == 1


def test_the_paper_lets_experts_with_a_choice_go_by_id() -> None:
    # Expert 0 may go anywhere, expert 1 only to one of two.
    replicas = replica_table([[0, 1], [0, 1], [0]], 2)

    assert id_order(np.array([[0, 1]]), replicas, RNG).tolist() == [[0, 1]]
    assert fewest_first(np.array([[0, 1]]), replicas, RNG).tolist() == [[1, 0]]
