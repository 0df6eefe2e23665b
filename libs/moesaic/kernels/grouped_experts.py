# Grouped experts: the weighted sum of gated experts over the rows routed to them.
#   Layout     rows are sorted by slot, so each active slot is one pair of dense products.
#   Cost       2 * 3 * R * H * I operations; the active slots' weights are read once, others never.
#   Order      on a CPU a row's experts are added in ascending slot order: same input, same sum.
"""Grouped expert computation on a CPU."""

from collections.abc import Sequence

import torch
from torch import Tensor

from moesaic.kernels.gated_mlp import GatedMLP
from moesaic.native.library import lib


def grouped_experts(
    hidden_states: Tensor,
    topk_weights: Tensor,
    slot_ids: Tensor,
    experts: Sequence[GatedMLP | None],
) -> Tensor:
    """Compute each row's weighted sum over those of its experts that are held here.

    Args:
        hidden_states: float32 or bfloat16 ``[T, H]``.
        topk_weights: float32 ``[T, k]``.
        slot_ids: int32 or int64 ``[T, k]``, in ``-1..S-1``; -1 means that the expert is not held here and
            adds nothing.
        experts: ``S`` of them; ``None`` for a slot to which no row is routed.

    Returns:
        float32 ``[T, H]``.
    """
    slots = slot_ids.reshape(-1)  # [T * k]
    # Those not held here first.
    order = slots.argsort(stable=True)
    num_absent, *counts = (slots + 1).bincount(minlength=len(experts) + 1).tolist()
    order = order[num_absent:]  # [R]
    rows = order // slot_ids.shape[1]
    combined = hidden_states.new_zeros(hidden_states.shape, dtype=torch.float32)
    routed = hidden_states.index_select(0, rows).split_with_sizes(counts)
    active = [mlp(x) for mlp, x in zip(experts, routed, strict=True) if mlp is not None and len(x)]
    if not active:
        return combined
    weights = topk_weights.reshape(-1).index_select(0, order).unsqueeze(1)
    return combined.index_add_(0, rows, torch.cat(active).float().mul_(weights))


def sum_of_choices(results: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
    """Add up each row's experts, weighted, in ascending order: the bits of ``PackedSlots.compute`` with
    expert ``e`` in slot ``e``.

    Args:
        results: float32 ``[T * k, H]``: the output of each choice, row by row.
        topk_weights: float32 ``[T, k]``.
        topk_ids: int32 ``[T, k]``.

    Returns:
        float32 ``[T, H]``.
    """
    num_rows, top_k = topk_ids.shape
    first = torch.arange(num_rows).unsqueeze(1) * top_k
    order = topk_ids.argsort(dim=1)  # [T, k]
    routed = (first + order.argsort(dim=1)).int().contiguous()
    ascending = results.index_select(0, (first + order).flatten())
    weights = topk_weights.contiguous()
    out = torch.empty(num_rows, results.shape[1])
    lib().sum_of_choices(
        results=ascending.data_ptr(),
        num_rows=num_rows,
        hidden=results.shape[1],
        weights=weights.data_ptr(),
        routed=routed.data_ptr(),
        top_k=top_k,
        out=out.data_ptr(),
        threads=torch.get_num_threads(),
    )
    return out
