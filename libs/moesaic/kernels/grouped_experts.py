# Grouped experts: the weighted sum of SwiGLU experts over the rows routed to them.
#   Layout     rows are sorted by slot, so each active slot is one pair of dense products.
#   Cost       2 * 3 * R * H * I operations; the active slots' weights are read once, others never.
#   Order      a row's experts are added in ascending slot order, in float32: same input, same sum.
"""Grouped expert computation."""

import torch
from torch import Tensor
from torch.nn import functional as F


def grouped_experts(
    hidden_states: Tensor, topk_weights: Tensor, slot_ids: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """Each row's weighted sum over those of its experts that are held here.

    Args:
        hidden_states: float32 or bfloat16 ``[T, H]``.
        topk_weights: float32 ``[T, k]``.
        slot_ids: int64 ``[T, k]``, in ``-1..S-1``; -1 means that the expert is not held here and
            adds nothing.
        gate_up: ``[S, 2I, H]``, dtype of ``hidden_states``: gate, then up.
        down: ``[S, H, I]``, same dtype.

    Returns:
        float32 ``[T, H]``.
    """
    slot_ids, ascending = slot_ids.sort(dim=1)
    topk_weights = topk_weights.gather(1, ascending)
    order = slot_ids.reshape(-1).argsort(stable=True)  # [T * k], those not held here first
    counts = (slot_ids.reshape(-1) + 1).bincount(minlength=gate_up.shape[0] + 1).tolist()
    order = order[counts[0] :]  # [R]

    routed = hidden_states.index_select(0, order // slot_ids.shape[1])  # [R, H]
    gate, up = _per_slot(routed, gate_up, counts[1:]).chunk(2, dim=-1)
    expert_out = _per_slot(F.silu(gate) * up, down, counts[1:])  # [R, H]

    # Each row sums its own k outputs. To add routed rows in place would, on a GPU, leave their
    # order to chance.
    by_choice = expert_out.new_zeros(slot_ids.numel(), expert_out.shape[1], dtype=torch.float32)
    by_choice.index_copy_(0, order, expert_out.float())
    by_choice = by_choice.view(*slot_ids.shape, expert_out.shape[1])  # [T, k, H]
    return torch.bmm(topk_weights.unsqueeze(1), by_choice).squeeze(1)


def _per_slot(x: Tensor, weights: Tensor, counts: list[int]) -> Tensor:
    """``x @ weights[s].T`` for the ``counts[s]`` rows of each slot ``s``: ``[R, A]``, ``[S, B, A]`` -> ``[R, B]``."""
    out = x.new_empty(x.shape[0], weights.shape[1])
    active = [slot for slot, count in enumerate(counts) if count]
    if not active:
        return out
    sizes = [counts[slot] for slot in active]
    parts = zip(active, torch.split(x, sizes), torch.split(out, sizes), strict=True)
    for slot, part, part_out in parts:
        torch.mm(part, weights[slot].t(), out=part_out)
    return out
