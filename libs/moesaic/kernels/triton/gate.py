# Gate: softmax over all experts, group-limited routing, top k, normalisation and scaling in one pass.
#   Grid       (T,); one warp holds all scores of one row in registers.
#   Layout     gate_logits [T, E] row-major, any float; topk_weights, topk_ids [T, k] row-major.
#   Cost       memory-bound: E * itemsize + 8 * k bytes a row; k + topk_group reductions of E keys.
#   Order      heaviest first; of equal scores the lowest expert (torch leaves that open), so any two
#              machines with the same logits choose alike.
#   Reference  moesaic.models.layers.gate.select_experts.
"""The gate's choice in one kernel."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _largest(scores, column, candidate):
    """The largest of the candidates' scores, as one key: its bits above, the inverted column below.

    Scores are not negative, so their bits order as they do. Without the sign bit a NaN is merely
    the largest; the column read back from a key is always one of the candidates.
    """
    bits = (scores.to(tl.int32, bitcast=True) & 0x7FFFFFFF).to(tl.int64)
    keys = tl.where(candidate, (bits << 32) | (0x7FFFFFFF - column), -1)
    return tl.max(keys, axis=0)


@triton.jit
def _column(key):
    return 0x7FFFFFFF - (key & 0x7FFFFFFF)


@triton.jit
def _score(key):
    return (key >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _gate_kernel(
    gate_logits,
    topk_weights,
    topk_ids,
    logits_stride,
    scaling,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_POW2: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_POW2: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOPK_GROUP: tl.constexpr,
    NORMALISE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS_POW2)
    real = expert < NUM_EXPERTS
    logits = tl.load(gate_logits + row * logits_stride + expert, mask=real, other=float("-inf"))
    logits = logits.to(tl.float32)
    scores = tl.exp(logits - tl.max(logits, axis=0))
    scores = scores / tl.sum(scores, axis=0)

    if (
        TOPK_GROUP < NUM_GROUPS
    ):  # the best groups are those of the best experts, one group at a time
        group = expert // (NUM_EXPERTS // NUM_GROUPS)
        candidate = real
        for _ in tl.static_range(TOPK_GROUP):
            best = _column(_largest(scores, expert, candidate)) // (NUM_EXPERTS // NUM_GROUPS)
            candidate = candidate & (group != best)
        scores = tl.where(candidate, 0.0, scores)  # what is still a candidate was not kept

    choice = tl.arange(0, TOP_K_POW2)
    weights = tl.zeros((TOP_K_POW2,), tl.float32)
    ids = tl.zeros((TOP_K_POW2,), tl.int32)
    candidate = real
    for i in tl.static_range(TOP_K):
        key = _largest(scores, expert, candidate)
        column = _column(key)
        weights = tl.where(choice == i, _score(key), weights)
        ids = tl.where(choice == i, column.to(tl.int32), ids)
        candidate = candidate & (expert != column)
    if NORMALISE:
        weights = weights / tl.sum(weights, axis=0)
    out = row * TOP_K + choice
    tl.store(topk_weights + out, weights * scaling, mask=choice < TOP_K)
    tl.store(topk_ids + out, ids, mask=choice < TOP_K)


def select_experts(
    gate_logits: Tensor,
    *,
    top_k: int,
    num_groups: int = 1,
    topk_group: int = 1,
    normalise: bool,
    scaling: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Choose the top-k experts of each token from its ``gate_logits`` (any float, ``[T, E]``).

    Args:
        gate_logits: rows may be strided, columns not.
        top_k: experts per token.
        num_groups: groups of equal size into which experts fall, in order.
        topk_group: a token's experts come from this many groups, those with the best experts.
        normalise: make the chosen weights of a row sum to 1.
        scaling: multiplies the weights, after that.

    Returns:
        topk_weights: float32 ``[T, k]``; topk_ids: int32 ``[T, k]``, heaviest first, the lower
            expert first where scores are equal.
    """
    num_rows, num_experts = gate_logits.shape
    assert gate_logits.stride(1) == 1
    assert num_experts % num_groups == 0
    topk_weights = gate_logits.new_empty(num_rows, top_k, dtype=torch.float32)
    topk_ids = gate_logits.new_empty(num_rows, top_k, dtype=torch.int32)
    if num_rows:
        _gate_kernel[(num_rows,)](
            gate_logits,
            topk_weights,
            topk_ids,
            gate_logits.stride(0),
            scaling,
            NUM_EXPERTS=num_experts,
            EXPERTS_POW2=triton.next_power_of_2(num_experts),
            TOP_K=top_k,
            TOP_K_POW2=triton.next_power_of_2(top_k),
            NUM_GROUPS=num_groups,
            TOPK_GROUP=topk_group,
            NORMALISE=normalise,
            num_warps=1,
        )
    return topk_weights, topk_ids
