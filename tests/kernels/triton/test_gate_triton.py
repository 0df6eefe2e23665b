"""The gate's kernel against the gate's reference."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="triton is not installed")

from moesaic.kernels.triton.gate import select_experts
from moesaic.models.configuration.architecture import MoE
from moesaic.models.layers.gating import Gating

DTYPES = [torch.float32, torch.bfloat16]


def gate_of(
    num_experts: int, top_k: int, n_group: int, topk_group: int, normalise: bool, **rules: Any
) -> MoE:
    return MoE(
        num_experts=num_experts,
        top_k=top_k,
        expert_size=1,
        norm_topk_prob=normalise,
        routed_scaling_factor=1.0 if normalise else 16.0,
        topk_method=rules.pop("topk_method", "group_limited_greedy"),
        n_group=n_group,
        topk_group=topk_group,
        **rules,
    )


def check(gate_logits: torch.Tensor, moe: MoE) -> None:
    correction = 0.3 * torch.randn(moe.num_experts) if moe.correction_bias else None
    here = None if correction is None else correction.to(gate_logits.device)
    weights, ids = Gating(moe, here).select_on_gpu(gate_logits)

    expected, _ = Gating(moe, correction).select_reference(gate_logits.cpu())
    scores = gate_logits.cpu().float()
    scores = scores.sigmoid() if moe.scoring_func == "sigmoid" else scores.softmax(dim=-1)
    scores = scores.gather(1, ids.cpu().long())
    if moe.norm_topk_prob:
        least = scores.sum(dim=-1, keepdim=True).clamp(min=moe.norm_least)
        scores = scores / (least + moe.norm_epsilon)
    # Two machines' exp differ in the last bit; so may the order of experts whose scores are alike.
    torch.testing.assert_close(weights.cpu(), expected, atol=1e-6, rtol=2e-6)
    torch.testing.assert_close(
        weights.cpu(), scores * moe.routed_scaling_factor, atol=1e-6, rtol=2e-6
    )
    assert ids.dtype == torch.int32
    assert all(len(set(row)) == moe.top_k for row in ids.tolist())


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_it_chooses_as_the_reference_does(device: torch.device, data: st.DataObject) -> None:
    n_group = data.draw(st.sampled_from([1, 1, 2, 3, 8]))
    size = data.draw(st.integers(1, 20))
    topk_group = data.draw(st.integers(1, n_group))
    top_k = data.draw(st.integers(1, min(8, topk_group * size)))
    moe = gate_of(
        n_group * size,
        top_k,
        n_group,
        topk_group,
        data.draw(st.booleans()),
        topk_method=data.draw(st.sampled_from(["group_limited_greedy", "noaux_tc"])),
        scoring_func=data.draw(st.sampled_from(["softmax", "sigmoid"])),
        correction_bias=data.draw(st.booleans()),
        norm_epsilon=data.draw(st.sampled_from([0.0, 0.5])),
        norm_least=data.draw(st.sampled_from([0.0, 1.5])),
    )
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))
    logits = 3 * torch.randn(data.draw(st.integers(1, 5)), moe.num_experts, generator=generator)

    check(logits.to(device, data.draw(st.sampled_from(DTYPES))), moe)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 7, 64, 8192])
@pytest.mark.parametrize(
    "moe",
    [
        gate_of(8, 2, 1, 1, True),
        gate_of(60, 4, 1, 1, False),
        gate_of(128, 8, 1, 1, True),
        gate_of(160, 6, 8, 3, False),
        gate_of(256, 8, 8, 4, True),
        gate_of(
            *(256, 8, 8, 4, True),
            topk_method="noaux_tc",
            scoring_func="sigmoid",
            correction_bias=True,
        ),
    ],
    ids=lambda moe: f"{moe.num_experts}-experts",
)
def test_it_chooses_as_the_reference_does_at_a_models_size(
    moe: MoE, num_rows: int, dtype: torch.dtype
) -> None:
    check(torch.randn(num_rows, moe.num_experts, device="cuda").to(dtype), moe)


def test_equal_scores_fall_to_the_lowest_experts(device: torch.device) -> None:
    weights, ids = select_experts(torch.zeros(2, 11, device=device), top_k=3, normalise=True)

    assert ids.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(weights.cpu(), torch.full((2, 3), 1 / 3))


def test_experts_far_behind_have_a_weight_of_zero_and_are_still_experts(
    device: torch.device,
) -> None:
    logits = torch.tensor([[0.0, -300.0, -300.0, 200.0]], device=device)

    weights, ids = select_experts(logits, top_k=3, normalise=True)

    assert ids.tolist() == [[3, 0, 1]]
    assert weights.tolist() == [[1.0, 0.0, 0.0]]


def test_no_rows_choose_nothing(device: torch.device) -> None:
    weights, ids = select_experts(torch.zeros(0, 8, device=device), top_k=3, normalise=True)

    assert weights.shape == ids.shape == (0, 3)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, at NaN
def test_a_row_of_nan_chooses_experts_that_exist(device: torch.device) -> None:
    logits = torch.full((1, 5), float("nan"), device=device)

    weights, ids = select_experts(logits, top_k=2, normalise=True)

    assert weights.isnan().all()
    assert ids.tolist() == [[0, 1]]


def test_rows_may_be_strided(device: torch.device) -> None:
    wide = torch.randn(3, 40, device=device)

    got = select_experts(wide[:, 8:24], top_k=4, normalise=True)

    assert all(
        torch.equal(*pair)
        for pair in zip(
            got, select_experts(wide[:, 8:24].clone(), top_k=4, normalise=True), strict=True
        )
    )
