"""What is fused by hand equals what autograd composes, values and gradients."""

import torch
from torch import Tensor
from torch.nn import functional as F

from models.training import fused


def _gradients(loss: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(loss, inputs))


def _leaf(*sizes: int) -> Tensor:
    return torch.randn(*sizes, dtype=torch.float64, requires_grad=True)


def _plain_experts(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    gate, up = torch.einsum("nh,nkih->nki", x, gate_up[ids]).chunk(2, dim=-1)
    return torch.einsum("nki,nkhi,nk->nh", F.silu(gate) * up, down[ids], weights)


def test_experts_equal_the_plain_sum_also_where_an_expert_has_no_rows() -> None:
    torch.manual_seed(0)
    rows, top_k, experts, hidden, inner = 23, 3, 7, 6, 4
    inputs = [
        _leaf(rows, hidden), _leaf(rows, top_k), _leaf(experts, 2 * inner, hidden),
        _leaf(experts, hidden, inner),
    ]  # fmt: skip
    x, weights, gate_up, down = inputs
    probs = torch.rand(rows, experts)
    probs[:4] = 0.5  # all tie
    probs[:, [0, 4]] = -1.0  # nobody's choice
    ids = probs.topk(top_k, dim=-1).indices
    direction = torch.randn(rows, hidden, dtype=torch.float64)

    found = fused.routed_experts(x, ids, weights, gate_up, down)
    expected = _plain_experts(x, ids, weights, gate_up, down)

    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        _gradients((found * direction).sum(), inputs),
        _gradients((expected * direction).sum(), inputs),
    )


def test_an_expert_that_a_row_chose_twice_counts_twice() -> None:
    torch.manual_seed(0)
    inputs = [_leaf(5, 6), _leaf(5, 2), _leaf(3, 8, 6), _leaf(3, 6, 4)]
    x, weights, gate_up, down = inputs
    ids = torch.ones(5, 2, dtype=torch.int64)

    found = fused.routed_experts(x, ids, weights, gate_up, down)
    expected = _plain_experts(x, ids, weights, gate_up, down)

    torch.testing.assert_close(
        _gradients(found.square().sum(), inputs), _gradients(expected.square().sum(), inputs)
    )


def test_the_loss_equals_cross_entropy_over_several_chunks() -> None:
    torch.manual_seed(0)
    rows, hidden, words = 2 * fused.LOSS_ROWS + 5, 8, 31
    inputs = [_leaf(rows, hidden), _leaf(words, hidden)]
    states, embedding = inputs
    targets = torch.randint(0, words, (rows,))
    weights = torch.rand(rows, dtype=torch.float64)
    weights[::7] = 0

    found = fused.weighted_loss(states, embedding, targets, weights)
    losses = F.cross_entropy(states @ embedding.T, targets, reduction="none")
    expected = (losses * weights).sum() / weights.sum()

    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(_gradients(3 * found, inputs), _gradients(3 * expected, inputs))


def test_norms_equal_torchs() -> None:
    torch.manual_seed(0)
    x, y, weight = _leaf(3, 5, 8), _leaf(3, 5, 8), _leaf(8)
    total, normed = fused.add_rms_norm(x, y, weight, 1e-6)

    torch.testing.assert_close(total, x + y)
    torch.testing.assert_close(normed, F.rms_norm(x + y, (8,), weight, 1e-6))
    torch.testing.assert_close(fused.rms_norm(x, weight, 1e-6), F.rms_norm(x, (8,), weight, 1e-6))


def test_attention_in_spans_equals_attention_over_all_keys() -> None:
    torch.manual_seed(0)
    length = 2 * fused.QUERY_BLOCK + 9
    inputs = [_leaf(2, 3, length, 8) for _ in range(3)]
    document = torch.stack([torch.arange(length) // 100, torch.arange(length) // 37])
    mask = (document[:, :, None] == document[:, None, :]).tril()[:, None]
    bias = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -torch.inf)

    spans = fused.spans_of(mask)
    found = fused.attention(*inputs, bias, spans)
    expected = F.scaled_dot_product_attention(*inputs, attn_mask=mask).transpose(1, 2).flatten(2)

    assert max(behind - first for _, _, _, first, behind in spans) < length
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        _gradients(found.square().sum(), inputs), _gradients(expected.square().sum(), inputs)
    )
