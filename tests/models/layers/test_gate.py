"""Routing, against a plain restatement of each family's rule."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moesaic.models.configuration.config import MoE
from moesaic.models.layers.gate import Gate, select_experts

GREEDY = MoE(
    num_experts=12,
    top_k=3,
    expert_size=8,
    norm_topk_prob=False,
    routed_scaling_factor=1.0,
    topk_method="greedy",
    n_group=1,
    topk_group=1,
    float32_gate=False,
    shared_expert_size=0,
    shared_expert_gated=False,
)
LIMITED = replace(GREEDY, topk_method="group_limited_greedy", n_group=4, topk_group=2)


def random_logits(seed: int, num_tokens: int = 5) -> torch.Tensor:
    return 3 * torch.randn(num_tokens, 12, generator=torch.Generator().manual_seed(seed))


@given(st.integers(0, 10**6), st.integers(1, 12))
def test_greedy_takes_the_heaviest_experts_with_their_softmax_weights(
    seed: int, top_k: int
) -> None:
    logits = random_logits(seed)

    topk_weights, topk_ids = select_experts(logits, replace(GREEDY, top_k=top_k))

    scores = logits.softmax(-1)
    assert topk_ids.dtype == torch.int32
    assert topk_weights.dtype == torch.float32
    torch.testing.assert_close(topk_weights, scores.sort(descending=True).values[:, :top_k])
    torch.testing.assert_close(topk_weights, scores.gather(1, topk_ids.long()))


def test_normalised_weights_are_the_softmax_over_the_chosen() -> None:
    logits = random_logits(1)

    topk_weights, topk_ids = select_experts(logits, replace(GREEDY, norm_topk_prob=True))

    torch.testing.assert_close(topk_weights, logits.gather(1, topk_ids.long()).softmax(-1))


@given(st.integers(0, 10**6), st.sampled_from([1.0, 2.5]))
def test_group_limited_routing_stays_within_the_best_groups(seed: int, scale: float) -> None:
    logits = random_logits(seed, num_tokens=1)

    topk_weights, topk_ids = select_experts(logits, replace(LIMITED, routed_scaling_factor=scale))

    scores = logits[0].softmax(-1).tolist()
    groups = sorted(range(4), key=lambda group: -max(scores[3 * group : 3 * group + 3]))[:2]
    allowed = [expert for expert in range(12) if expert // 3 in groups]
    expected = sorted(allowed, key=lambda expert: -scores[expert])[:3]
    assert topk_ids[0].tolist() == expected
    assert topk_weights[0].tolist() == pytest.approx(
        [scale * scores[i] for i in expected], rel=1e-5
    )


@pytest.mark.parametrize("moe", [GREEDY, LIMITED], ids=["greedy", "limited"])
@given(seed=st.integers(0, 10**6))
def test_of_equal_experts_and_groups_the_lowest_are_taken(moe: MoE, seed: int) -> None:
    logits = (
        random_logits(seed).round().bfloat16()
    )  # a handful of numbers, so most are equal to others

    _, topk_ids = select_experts(logits, moe)

    size = moe.num_experts // moe.n_group
    for row, ids in zip(logits.tolist(), topk_ids.tolist(), strict=True):
        groups = sorted(range(moe.n_group), key=lambda g: (-max(row[g * size : (g + 1) * size]), g))
        kept = [e for e in range(moe.num_experts) if e // size in groups[: moe.topk_group]]
        assert ids == sorted(kept, key=lambda e: (-row[e], e))[: moe.top_k]


def test_a_float32_gate_ignores_the_dtype_of_the_hidden_states() -> None:
    hidden = torch.randn(4, 6).to(torch.bfloat16)
    weight = torch.randn(12, 6)

    topk_weights, topk_ids = Gate(weight, GREEDY)(hidden)

    expected = select_experts(hidden.float() @ weight.T, GREEDY)
    torch.testing.assert_close((topk_weights, topk_ids), expected)
