"""Scheduling experts on a CPU: compiled, in torch and in numpy they decide alike."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from moesaic.kernels import aebs
from moesaic.native import library
from moesaic.placement.schedule.aebs import Costs, replica_table, schedule_experts

NAMES = ("replica", "instance", "load", "replica_of_choice")
Arrays = tuple[NDArray[Any], ...]


def drawn(seed: int, rows: int, top_k: int, experts: int, instances: int, share: float) -> Arrays:
    """topk_ids, replicas, live, load, weights, row; small numbers, so that ties are common."""
    rng = np.random.default_rng(seed)
    replicas = rng.permutation(experts * instances).reshape(experts, instances).astype(np.int32)
    replicas[rng.random(replicas.shape) > share] = -1
    topk_ids = rng.integers(-2, experts + 2, (rows, top_k)).astype(rng.choice(["i4", "i8"]))
    load, weights, row = (rng.integers(0, 4, instances) for _ in range(3))
    if seed % 2 == 0:  # every expert costs the same: what is then improved
        weights, row = np.full(instances, 1 + seed % 3), np.zeros(instances, np.int64)
    return topk_ids, replicas, rng.random(instances) < 0.9, load, weights, row


def check(arrays: Arrays, window: tuple[int, int] = aebs.EVERY_REPLICA) -> None:
    topk_ids, replicas, live, load, weights, row = arrays
    expected = schedule_experts(topk_ids, replicas, live=live, load=load, costs=Costs(weights, row))
    of_choice = expected.replica_of_choice
    inside = (of_choice >= window[0]) & (of_choice < window[1])
    wanted = (
        expected.replica,
        expected.instance,
        expected.load,
        np.where(inside, of_choice - window[0], np.int32(-1)),
    )
    tensors = [torch.from_numpy(array.copy()) for array in arrays]

    got = aebs.schedule_experts(*tensors[:4], Costs(*tensors[4:]), window)

    for name, array in zip(NAMES, wanted, strict=True):
        tensor = getattr(got, name)
        assert tensor.numpy().dtype == array.dtype, name
        np.testing.assert_array_equal(tensor.numpy(), array, name)
    np.testing.assert_array_equal(tensors[3], load)


@pytest.mark.usefixtures("native")
@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(0, 40),
    top_k=st.integers(1, 6),
    experts=st.integers(1, 48),
    instances=st.integers(1, 12),
    share=st.sampled_from([0.0, 0.2, 0.5, 1.0]),
    window=st.none() | st.tuples(st.integers(0, 40), st.integers(0, 80)),
)
@example(seed=1, rows=700, top_k=8, experts=160, instances=16, share=0.1, window=None)
@example(seed=1, rows=64, top_k=8, experts=256, instances=72, share=0.02, window=None)  # two words
@example(seed=2, rows=200, top_k=4, experts=60, instances=130, share=0.03, window=(70, 90))
@example(seed=15108, rows=30, top_k=3, experts=40, instances=10, share=0.2, window=None)
@example(seed=9104, rows=30, top_k=3, experts=40, instances=10, share=0.2, window=None)
def test_the_compiled_schedule_is_that_of_numpy(
    seed: int,
    rows: int,
    top_k: int,
    experts: int,
    instances: int,
    share: float,
    window: tuple[int, int] | None,
) -> None:
    arrays = drawn(seed, rows, top_k, experts, instances, share)
    check(arrays, window or aebs.EVERY_REPLICA)


@pytest.mark.usefixtures("native")
def test_large_numbers_are_neither_rounded_nor_cut() -> None:
    topk_ids, replicas, live, _, _, _ = drawn(3, 20, 2, 8, 4, 0.7)
    large = np.array([2**53 + 1, 2**53, 2**53 + 1, 2**53])
    ids = topk_ids.astype(np.int64)
    ids[0, 0] = 2**32 + 1  # no expert, though its lower half is

    check((ids, replicas, live, large, large + 1, large // 2**10))


def test_without_a_compiler_numpy_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "library", lambda: None)

    for seed in range(20):
        check(drawn(seed, 12, 2, 9, 4, 0.5), (3, 20))


@pytest.mark.usefixtures("native")
def test_a_window_of_one_instance_shows_its_slots() -> None:
    slots = [[2, -1, 0], [1, 2]]
    replicas = torch.from_numpy(replica_table(slots, 3))
    ones, zeros = torch.ones(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    topk_ids = torch.tensor([[0, 1], [2, 0]], dtype=torch.int32)

    def slots_of(window: tuple[int, int]) -> list[list[int]]:
        lives = torch.ones(2, dtype=torch.bool)
        schedule = aebs.schedule_experts(
            topk_ids, replicas, lives, torch.tensor([0, 5]), Costs(ones, zeros), window
        )
        return schedule.replica_of_choice.tolist()

    assert slots_of((0, 3)) == [[2, -1], [0, 2]]
    assert slots_of((3, 5)) == [[-1, 0], [-1, -1]]
