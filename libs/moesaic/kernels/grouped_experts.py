# Grouped experts: the weighted sum of SwiGLU experts over the rows routed to them.
#   Layout     rows are sorted by slot, so each active slot is one pair of dense products.
#   Cost       2 * 3 * R * H * I operations; the active slots' weights are read once, others never.
#   Order      on a CPU a row's experts are added in ascending slot order: same input, same sum.
"""Grouped expert computation on a CPU."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from moesaic.kernels.gated_mlp import GatedMLP, PackedMLP
from moesaic.kernels.native.library import Expert, lib, scratch


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
    routed = hidden_states.index_select(0, rows).split_with_sizes(counts)
    active = [mlp(x) for mlp, x in zip(experts, routed, strict=True) if mlp is not None and len(x)]
    if not active:
        return combined
    weights = topk_weights.reshape(-1).index_select(0, order).unsqueeze(1)
    return combined.index_add_(0, rows, torch.cat(active).float().mul_(weights))


def sum_of_choices(results: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
    """Each row's weighted sum over its experts, added in ascending order: the bits of ``PackedSlots.compute``
    where expert ``e`` lies in slot ``e``.

    Args:
        results: float32 ``[T * k, H]``: what each choice gives, row by row.
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
        ascending.data_ptr(),
        num_rows,
        results.shape[1],
        weights.data_ptr(),
        routed.data_ptr(),
        top_k,
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


class PackedSlots:
    """The experts of one layer as the kernel for CPUs finds them, slot by slot."""

    def __init__(self, experts: Sequence[PackedMLP | None]) -> None:
        """Take ``S`` experts, one at least; ``None`` where no row is routed."""
        self._held = experts
        some = next(mlp for mlp in experts if mlp is not None)
        self._hidden_size, self.size = some.hidden_size, some.size
        self.c = (ctypes.POINTER(Expert) * len(experts))()
        for slot, mlp in enumerate(experts):
            if mlp is not None:
                self.c[slot] = ctypes.pointer(mlp.c)

    def compute(self, hidden_states: Tensor, topk_weights: Tensor, slot_ids: Tensor) -> Tensor:
        """As ``grouped_experts``; float32 rows, int32 slots."""
        assert slot_ids.dtype == torch.int32
        hidden_states, topk_weights, slot_ids = (
            tensor.contiguous() for tensor in (hidden_states, topk_weights, slot_ids)
        )
        (num_rows, top_k), threads = slot_ids.shape, torch.get_num_threads()
        assert hidden_states.shape == (num_rows, self._hidden_size)
        out = torch.empty(num_rows, self._hidden_size)
        sizes = self._hidden_size, self.size
        needed = lib().experts_scratch(num_rows, top_k, *sizes, len(self.c), threads)
        lib().experts(
            self.c,
            len(self.c),
            hidden_states.data_ptr(),
            num_rows,
            *sizes,
            topk_weights.data_ptr(),
            slot_ids.data_ptr(),
            top_k,
            out.data_ptr(),
            scratch(needed),
            threads,
        )
        return out
