"""Routing, against a plain restatement of each family's rule."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.models.configuration.architecture import MoE
from moesaic.models.layers.gate import Gate
from moesaic.models.layers.gating import Gating

GREEDY = MoE(num_experts=12, top_k=3, expert_size=8, norm_topk_prob=False)
METHODS = ["greedy", "group_limited_greedy", "noaux_tc"]
LIMITED = replace(GREEDY, topk_method="group_limited_greedy", n_group=4, topk_group=2)


def random_logits(seed: int, num_tokens: int = 5) -> torch.Tensor:
    return 3 * torch.randn(num_tokens, 12, generator=torch.Generator().manual_seed(seed))


@given(st.integers(0, 10**6), st.integers(0, 50), st.integers(1, 12))
def test_greedy_takes_the_heaviest_experts_with_their_softmax_weights(
    seed: int, num_tokens: int, top_k: int
) -> None:
    logits = random_logits(seed, num_tokens)

    topk_weights, topk_ids = Gating(replace(GREEDY, top_k=top_k)).select(logits)

    scores = logits.softmax(-1)
    assert topk_ids.dtype == torch.int32
    assert topk_weights.dtype == torch.float32
    torch.testing.assert_close(topk_weights, scores.sort(descending=True).values[:, :top_k])
    torch.testing.assert_close(topk_weights, scores.gather(1, topk_ids.long()))


def test_normalised_weights_are_the_softmax_over_the_chosen() -> None:
    logits = random_logits(1)

    topk_weights, topk_ids = Gating(replace(GREEDY, norm_topk_prob=True)).select(logits)

    torch.testing.assert_close(topk_weights, logits.gather(1, topk_ids.long()).softmax(-1))


@given(st.integers(0, 10**6), st.sampled_from([1.0, 2.5]))
def test_group_limited_routing_stays_within_the_best_groups(seed: int, scale: float) -> None:
    logits = random_logits(seed, num_tokens=1)

    topk_weights, topk_ids = Gating(replace(LIMITED, routed_scaling_factor=scale)).select(logits)

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

    _, topk_ids = Gating(moe).select(logits)

    size = moe.num_experts // moe.n_group
    for row, ids in zip(logits.tolist(), topk_ids.tolist(), strict=True):
        groups = sorted(range(moe.n_group), key=lambda g: (-max(row[g * size : (g + 1) * size]), g))
        kept = [e for e in range(moe.num_experts) if e // size in groups[: moe.topk_group]]
        assert ids == sorted(kept, key=lambda e: (-row[e], e))[: moe.top_k]


def test_a_float32_gate_ignores_the_dtype_of_the_hidden_states() -> None:
    hidden = torch.randn(4, 6).to(torch.bfloat16)
    weight = torch.randn(12, 6)

    topk_weights, topk_ids = Gate(weight, GREEDY)(hidden)

    expected = Gating(GREEDY).select(hidden.float() @ weight.T)
    torch.testing.assert_close((topk_weights, topk_ids), expected)


def chosen_exactly(logits: list[float], moe: MoE, correction: list[float]) -> dict[int, float]:
    """Experts and weights of one row, in float64, as arXiv:2412.19437 has them; with Ernie's softmax too."""
    if moe.scoring_func == "sigmoid":
        scores = [1 / (1 + math.exp(-x)) for x in logits]
    else:
        exps = [math.exp(x - max(logits)) for x in logits]
        scores = [x / sum(exps) for x in exps]
    ranks = [score + own for score, own in zip(scores, correction, strict=True)]
    size, best = moe.num_experts // moe.n_group, 2 if moe.topk_method == "noaux_tc" else 1
    groups = sorted(
        range(moe.n_group),
        key=lambda g: -sum(sorted(ranks[g * size : (g + 1) * size], reverse=True)[:best]),
    )
    allowed = [e for e in range(moe.num_experts) if e // size in groups[: moe.topk_group]]
    ids = sorted(allowed, key=lambda e: -ranks[e])[: moe.top_k]
    total = max(sum(scores[e] for e in ids), moe.norm_least) + moe.norm_epsilon
    divisor = total if moe.norm_topk_prob else 1.0
    return {e: scores[e] / divisor * moe.routed_scaling_factor for e in ids}


@settings(deadline=None)
@given(data=st.data(), seed=st.integers(0, 10**6))
def test_every_rule_chooses_as_its_definition_says(data: st.DataObject, seed: int) -> None:
    n_group = data.draw(st.sampled_from([1, 2, 4, 8]))
    size, topk_group = data.draw(st.integers(1, 40)), data.draw(st.integers(1, n_group))
    moe = MoE(
        num_experts=n_group * size,
        top_k=data.draw(st.integers(1, min(8, topk_group * size))),
        expert_size=1,
        norm_topk_prob=data.draw(st.booleans()),
        routed_scaling_factor=data.draw(st.sampled_from([1.0, 2.5])),
        topk_method=data.draw(st.sampled_from(METHODS[n_group > 1 :])),
        n_group=n_group,
        topk_group=topk_group,
        scoring_func=data.draw(st.sampled_from(["softmax", "sigmoid"])),
        correction_bias=data.draw(st.booleans()),
        norm_epsilon=data.draw(st.sampled_from([0.0, 1e-20, 0.5])),
        norm_least=data.draw(st.sampled_from([0.0, 1e-12, 1.5])),
    )
    generator = torch.Generator().manual_seed(seed)
    num_rows = data.draw(st.sampled_from([1, 3, 3, 50]))
    logits = 3 * torch.randn(num_rows, moe.num_experts, generator=generator)
    bias = torch.randn(moe.num_experts, generator=generator) * data.draw(
        st.sampled_from([0.0, 0.1, 3.0])
    )
    gating, before = Gating(moe, bias if moe.correction_bias else None), logits.clone()

    found = {"c": gating.select(logits), "torch": gating.select_reference(logits)}

    assert torch.equal(logits, before)
    own = bias.tolist() if moe.correction_bias else [0.0] * moe.num_experts
    for way, (weights, ids) in found.items():
        for row, (expected, chosen) in enumerate(zip(weights, ids.tolist(), strict=True)):
            right = chosen_exactly(logits[row].tolist(), moe, own)
            assert chosen == list(right), way
            assert expected.tolist() == pytest.approx(list(right.values()), rel=3e-5), way


def test_logits_that_are_no_numbers_still_name_experts_there_are() -> None:
    logits = torch.full((3, 4), float("nan"))
    logits[1, 2], logits[2] = 1.0, float("-inf")

    weights, ids = Gating(replace(GREEDY, num_experts=4, top_k=2, norm_topk_prob=True)).select(
        logits
    )

    assert ((ids >= 0) & (ids < 4)).all()
    assert weights[:2].isnan().any(dim=1).all()
