"""Scheduling experts: numpy, torch and Triton decide alike."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="triton is not installed")

from moesaic.kernels import aebs
from moesaic.kernels.triton import aebs as aebs_triton
from moesaic.placement.schedule.aebs import UNAVAILABLE, Costs, Schedule, schedule_experts
from tests.kernels.test_aebs_native import Arrays, drawn


def check(
    arrays: Arrays, device: torch.device, window: tuple[int, int] = aebs.EVERY_REPLICA
) -> Schedule[torch.Tensor]:
    """Compare all three; on the CPU torch computes."""
    topk_ids, replicas, live, load, weights, row = arrays
    expected = schedule_experts(topk_ids, replicas, live=live, load=load, costs=Costs(weights, row))
    tensors = [torch.from_numpy(array) for array in arrays]
    on_device = [tensor.to(device) for tensor in tensors]

    reference = aebs.schedule_experts(*tensors[:4], Costs(*tensors[4:]), window)
    computed = aebs_triton.schedule_experts(*on_device[:4], Costs(*on_device[4:]), window)

    for name in ("replica", "instance", "load", "replica_of_choice"):
        wanted = getattr(expected, name)
        if name == "replica_of_choice":
            inside = (wanted >= window[0]) & (wanted < window[1])
            wanted = np.where(inside, wanted - window[0], np.int32(-1))
        for schedule in (reference, computed):
            tensor = getattr(schedule, name).cpu()
            assert tensor.numpy().dtype == wanted.dtype, name
            np.testing.assert_array_equal(tensor.numpy(), wanted, name)
    np.testing.assert_array_equal(on_device[3].cpu(), load)
    return computed


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(0, 12),
    top_k=st.integers(1, 4),
    experts=st.integers(1, 24),
    instances=st.integers(1, 9),
    share=st.sampled_from([0.0, 0.2, 0.5, 1.0]),
    alone=st.booleans(),
    window=st.sampled_from([aebs.EVERY_REPLICA, (10, 60)]),
)
# Several chunks.
@example(1, 700, 3, 160, 16, 0.1, True, (100, 900))
@example(1, 700, 3, 160, 40, 0.1, False, (100, 900))
# Eight experts move, on two ways; seven, on four.
@example(15108, 30, 3, 40, 10, 0.2, True, aebs.EVERY_REPLICA)
@example(9104, 30, 3, 40, 10, 0.2, True, aebs.EVERY_REPLICA)
@example(2, 2, 1, 1, 1, 1.0, True, (0, 1))
def test_all_three_decide_alike(
    device: torch.device,
    seed: int,
    rows: int,
    top_k: int,
    experts: int,
    instances: int,
    share: float,
    alone: bool,
    window: tuple[int, int],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aebs_triton, "_FEW_CHOICES", 10**6 if alone else -1)
        check(drawn(seed, rows, top_k, experts, instances, share), device, window)


def test_large_costs_are_added_without_rounding(device: torch.device) -> None:
    topk_ids, replicas, live, _, _, _ = drawn(3, 20, 2, 8, 4, 0.7)
    large = np.array([2**53 + 1, 2**53, 2**53 + 1, 2**53])

    check((topk_ids, replicas, live, large, large + 1, large // 2**10), device)


def test_an_expert_without_a_live_holder_is_unavailable(device: torch.device) -> None:
    one = np.ones(1, np.int64)
    schedule = check(
        (np.zeros((2, 1), np.int32), np.zeros((1, 1), np.int32), one < 1, one, one, one), device
    )

    assert schedule.instance.tolist() == [UNAVAILABLE]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 512, 8192])
@pytest.mark.parametrize(("experts", "instances"), [(128, 8), (160, 16), (256, 72)])
def test_it_schedules_a_models_experts(rows: int, experts: int, instances: int) -> None:
    check(drawn(0, rows, 8, experts, instances, 1.5 / instances), torch.device("cuda"))
