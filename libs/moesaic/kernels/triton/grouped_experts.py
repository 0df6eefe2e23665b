# Grouped experts on a GPU: rows in blocks that share a slot, two grouped products, and weighted sums.
#   Grid       of the sums (T, tiles); see grouped_products for the products.
#   Order      a row's experts are added in ascending slot order, in float32, with no atomics: same input, same sum.
#   Reference  moesaic.kernels.grouped_experts.
"""Grouped expert computation for CUDA."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesaic.kernels.triton.expert_order import FEW, expert_order, order_of_few
from moesaic.kernels.triton.grouped_products import SlotWeights, grouped_products, tile_shapes

_COMBINE_COLUMNS = 1024


@triton.jit(do_not_specialize=["num_slots"])
def _combine_kernel(
    expert_out,
    topk_weights,
    row_of_choice,
    combined,
    weights_stride,
    num_slots,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_POW2: tl.constexpr,
    COLUMNS: tl.constexpr,
    OF_FEW: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real = column < HIDDEN
    choice = tl.arange(0, TOP_K_POW2)
    mine = choice < TOP_K
    weights = tl.load(topk_weights + token * weights_stride + choice, mask=mine, other=0.0)
    rows = tl.load(row_of_choice + token * TOP_K + choice, mask=mine, other=-1)
    if OF_FEW:
        # They are slots, and each choice has its own row.
        rows = tl.where(rows < num_slots, rows.to(tl.int32) * TOP_K_POW2 + choice, -1)
    waiting = tl.where(rows < 0, 0x7FFFFFFF, rows)
    total = tl.zeros((COLUMNS,), tl.float32)
    # Rows ascend with their slots.
    for _ in tl.static_range(TOP_K):
        first = tl.min(waiting, axis=0)
        weight = tl.sum(tl.where(waiting == first, weights, 0.0), axis=0)
        held = first < 0x7FFFFFFF
        row = token * TOP_K + first % TOP_K_POW2 if OF_FEW else first
        out = tl.load(expert_out + row.to(tl.int64) * HIDDEN + column, mask=real & held, other=0.0)
        total += tl.where(held, weight, 0.0) * out.to(tl.float32)
        waiting = tl.where(waiting == first, 0x7FFFFFFF, waiting)
    tl.store(combined + token * HIDDEN + column, total, mask=real)


def grouped_experts(
    hidden_states: Tensor, topk_weights: Tensor, slot_ids: Tensor, slots: SlotWeights
) -> Tensor:
    """Compute as ``moesaic.kernels.grouped_experts.grouped_experts``; never waits for the device."""
    (num_rows, hidden), top_k = hidden_states.shape, slot_ids.shape[1]
    num_slots = len(slots.gate_up)
    assert hidden_states.stride(1) == topk_weights.stride(1) == 1
    combined = hidden_states.new_empty(num_rows, hidden, dtype=torch.float32)
    if not num_rows:
        return combined
    rows_per_slot = slot_ids.numel() / num_slots
    coded = slots.form is not None
    tiles = tile_shapes(rows_per_slot, hidden, slots.size, hidden_states.dtype, coded=coded)
    slot_ids, block_rows = slot_ids.contiguous(), tiles[0].rows
    if slot_ids.numel() <= FEW:
        order = order_of_few(slot_ids, block_rows)
    else:
        order = expert_order(slot_ids, num_slots, block_rows)
    expert_out = grouped_products(hidden_states, slots, order, top_k, tiles)
    _combine_kernel[(num_rows, triton.cdiv(hidden, _COMBINE_COLUMNS))](
        expert_out,
        topk_weights,
        order.row_of_choice,
        combined,
        topk_weights.stride(0),
        num_slots,
        HIDDEN=hidden,
        TOP_K=top_k,
        TOP_K_POW2=triton.next_power_of_2(top_k),
        COLUMNS=min(_COMBINE_COLUMNS, triton.next_power_of_2(hidden)),
        OF_FEW=order.of_few,
    )
    return combined
