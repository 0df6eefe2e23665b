# Grouped experts: the weighted sum of SwiGLU experts over the rows routed to them.
#   Layout     rows are sorted by slot, so each active slot is one pair of dense products.
#   Cost       2 * 3 * R * H * I operations; the active slots' weights are read once, others never.
#   Order      on a CPU a row's experts are added in ascending slot order: same input, same sum.
"""Grouped expert computation."""

from collections.abc import Sequence

import torch
from torch import Tensor

from moesaic.kernels.gated_mlp import GatedMLP, activate


def grouped_experts(
    hidden_states: Tensor,
    topk_weights: Tensor,
    slot_ids: Tensor,
    experts: Sequence[GatedMLP | None],
) -> Tensor:
    """Each row's weighted sum over those of its experts that are held here.

    Args:
        hidden_states: float32 or bfloat16 ``[T, H]``.
        topk_weights: float32 ``[T, k]``.
        slot_ids: int32 or int64 ``[T, k]``, in ``-1..S-1``; -1 means that the expert is not held here and
            adds nothing.
        experts: ``S`` of them; ``None`` where no row is routed.

    Returns:
        float32 ``[T, H]``.
    """
    slots = slot_ids.reshape(-1)  # [T * k]
    order = slots.argsort(stable=True)  # those not held here first
    num_absent, *counts = (slots + 1).bincount(minlength=len(experts) + 1).tolist()
    order = order[num_absent:]  # [R]
    rows = order // slot_ids.shape[1]
    combined = hidden_states.new_zeros(hidden_states.shape, dtype=torch.float32)
    active = [(mlp, n) for mlp, n in zip(experts, counts, strict=True) if n and mlp is not None]
    if not active:
        return combined

    mlps, sizes = zip(*active, strict=True)
    routed = mlps[0].gate_up.prepare(hidden_states).index_select(0, rows)  # [R, H]
    # All first products, what lies between, all second ones: of few rows an operation takes as long
    # as of many.
    gate_up = torch.cat(
        [mlp.gate_up.multiply(part) for mlp, part in zip(mlps, routed.split(sizes), strict=True)]
    )
    inner = mlps[0].down.prepare(activate(gate_up)).split(sizes)
    expert_out = torch.cat([mlp.down.multiply(part) for mlp, part in zip(mlps, inner, strict=True)])
    weights = topk_weights.reshape(-1).index_select(0, order).unsqueeze(1)
    # One routed row after the other. A GPU would add them as they come, in no order.
    return combined.index_add_(0, rows, expert_out.float().mul_(weights))
