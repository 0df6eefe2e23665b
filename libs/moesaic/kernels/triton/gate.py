# Gate: scores of all experts, group-limited choice, top k, normalisation and scaling in one pass.
#   Grid       (T,); one warp holds all scores of one row in registers.
#   Layout     gate_logits [T, E] row-major, any float; topk_weights, topk_ids [T, k] row-major.
#   Cost       memory-bound: E * itemsize + 8 * k bytes a row; k + topk_group reductions of E keys.
#   Order      the best first; of equal scores the lowest expert (torch leaves that open), so any two
#              machines with the same logits choose alike.
#   Reference  moesaic.models.layers.gating.Gating.select_reference.
"""The gate's choice in one kernel."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _largest(numbers, column, candidate):
    """The largest of the candidates' numbers, as one key: its bits above, the inverted column below.

    The bits of floats order as they do, if those behind the sign are turned round in negative ones. Even a NaN
    is above what is no candidate; so the column read back from a key is always one of the candidates.
    """
    bits = numbers.to(tl.int32, bitcast=True)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    keys = tl.where(candidate, (ordered << 32) | (0x7FFFFFFF - column), -0x8000000000000000)
    return tl.max(keys, axis=0)


@triton.jit
def _column(key):
    return 0x7FFFFFFF - (key & 0x7FFFFFFF)


@triton.jit
def _kept_groups(
    ranks,
    expert,
    real,
    SIZE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUPS_POW2: tl.constexpr,
    TOPK_GROUP: tl.constexpr,
    GROUP_BEST: tl.constexpr,
):
    """True for the experts of the best groups."""
    group = expert // SIZE
    kept = expert < 0
    # The groups of the best experts, one group at a time.
    if GROUP_BEST == 1:
        for _ in tl.static_range(TOPK_GROUP):
            best = _column(_largest(ranks, expert, real & ~kept)) // SIZE
            kept = kept | (group == best)
    else:
        index = tl.arange(0, GROUPS_POW2)
        of_group = tl.zeros((GROUPS_POW2,), tl.float32)
        for n in tl.static_range(NUM_GROUPS):
            first = _column(_largest(ranks, expert, group == n))
            both = tl.sum(tl.where(expert == first, ranks, 0.0), axis=0)
            if SIZE > 1:
                second = _column(_largest(ranks, expert, (group == n) & (expert != first)))
                both += tl.sum(tl.where(expert == second, ranks, 0.0), axis=0)
            of_group = tl.where(index == n, both, of_group)
        candidate = index < NUM_GROUPS
        for _ in tl.static_range(TOPK_GROUP):
            best = _column(_largest(of_group, index, candidate))
            candidate = candidate & (index != best)
            kept = kept | (group == best)
    return kept


@triton.jit
def _gate_kernel(
    gate_logits,
    correction,
    topk_weights,
    topk_ids,
    logits_stride,
    scaling,
    epsilon,
    least,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_POW2: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_POW2: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUPS_POW2: tl.constexpr,
    TOPK_GROUP: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    CORRECTED: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALISE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS_POW2)
    real = expert < NUM_EXPERTS
    logits = tl.load(gate_logits + row * logits_stride + expert, mask=real, other=float("-inf"))
    logits = logits.to(tl.float32)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        scores = tl.exp(logits - tl.max(logits, axis=0))
        scores = scores / tl.sum(scores, axis=0)
    ranks = scores
    if CORRECTED:
        ranks += tl.load(correction + expert, mask=real, other=0.0)

    candidate = real
    if TOPK_GROUP < NUM_GROUPS:
        candidate = candidate & _kept_groups(
            ranks,
            expert,
            real,
            NUM_EXPERTS // NUM_GROUPS,
            NUM_GROUPS,
            GROUPS_POW2,
            TOPK_GROUP,
            GROUP_BEST,
        )

    choice = tl.arange(0, TOP_K_POW2)
    weights = tl.zeros((TOP_K_POW2,), tl.float32)
    ids = tl.zeros((TOP_K_POW2,), tl.int32)
    for i in tl.static_range(TOP_K):
        column = _column(_largest(ranks, expert, candidate))
        score = tl.sum(tl.where(expert == column, scores, 0.0), axis=0)
        weights = tl.where(choice == i, score, weights)
        ids = tl.where(choice == i, column.to(tl.int32), ids)
        candidate = candidate & (expert != column)
    if NORMALISE:
        weights = weights / (tl.maximum(tl.sum(weights, axis=0), least) + epsilon)
    out = row * TOP_K + choice
    tl.store(topk_weights + out, weights * scaling, mask=choice < TOP_K)
    tl.store(topk_ids + out, ids, mask=choice < TOP_K)


def select_experts(
    gate_logits: Tensor,
    *,
    top_k: int,
    correction: Tensor | None = None,
    num_groups: int = 1,
    topk_group: int = 1,
    group_best: int = 1,
    sigmoid: bool = False,
    normalise: bool,
    epsilon: float = 0.0,
    least: float = 0.0,
    scaling: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Choose the top-k experts of each token from its ``gate_logits`` (any float, ``[T, E]``).

    Args:
        gate_logits: rows may be strided, columns not.
        top_k: experts per token.
        correction: float32 ``[E]``, added to scores where experts are chosen, not to weights; None: nothing is.
        num_groups: groups of equal size into which experts fall, in order.
        topk_group: a token's experts come from this many groups, the best.
        group_best: number of best experts of a group, 1 or 2, that make its score.
        sigmoid: scores are sigmoids of logits; False: their softmax.
        normalise: divide the chosen weights of a row by their sum.
        epsilon: added to that sum.
        least: least value of it, before that.
        scaling: multiplies the weights, after that.

    Returns:
        topk_weights: float32 ``[T, k]``; topk_ids: int32 ``[T, k]``, the best first, the lower
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
            gate_logits if correction is None else correction,
            topk_weights,
            topk_ids,
            gate_logits.stride(0),
            scaling,
            epsilon,
            least,
            NUM_EXPERTS=num_experts,
            EXPERTS_POW2=triton.next_power_of_2(num_experts),
            TOP_K=top_k,
            TOP_K_POW2=triton.next_power_of_2(top_k),
            NUM_GROUPS=num_groups,
            GROUPS_POW2=triton.next_power_of_2(num_groups),
            TOPK_GROUP=topk_group,
            GROUP_BEST=group_best,
            CORRECTED=correction is not None,
            SIGMOID=sigmoid,
            NORMALISE=normalise,
            num_warps=1,
        )
    return topk_weights, topk_ids
