# Grouped experts on a GPU: the rows of one slot in blocks, each a tile of two grouped products.
#   Grid       gate_up, down: blocks of rows times tiles of columns, GROUP blocks side by side, so
#              that a slot's weights stay in the L2 cache while its blocks pass; combine: (T, tiles).
#   Layout     hidden_states [T, H]; a slot's gate_up [2I, H] and down [H, I] lie anywhere, found by
#              address, so that one expert changes without the others being copied; activated
#              [rows, I] and expert_out [rows, H] in the order of expert_order_triton, in
#              hidden_states' dtype.
#   Cost       2 * 3 * R * H * I operations. Where a slot's rows fit one block its weights are read
#              once: the floor of a decode step. 2 * R * (I + H) numbers go through memory between.
#   Order      products accumulate in float32, then biases; the activated is rounded once. A row's experts are
#              added in ascending slot order, in float32, with no atomics: same input, same sum.
#   Reference  moesaic.kernels.grouped_experts.
"""Grouped expert computation for CUDA."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesaic.kernels.packed_experts import Clamped
from moesaic.kernels.triton.expert_order import ExpertOrder, expert_order
from moesaic.kernels.triton.shared_memory import is_roomy

_GROUP = 8
_COMBINE_COLUMNS = 1024
_ALIGNMENT = 16  # bytes; torch's allocations begin at multiples of far more


@dataclass(frozen=True)
class SlotWeights:
    """The experts of ``S`` slots, as the kernels read them."""

    gate_up: Tensor  # int64 [S]: addresses; 0 where the slot is empty
    down: Tensor
    biases: tuple[Tensor, Tensor] | None  # the same of their biases
    activation: Clamped | None
    size: int  # I
    held: tuple[tuple[Tensor, ...] | None, ...]  # what is at the addresses, kept alive

    @classmethod
    def of(
        cls,
        experts: Sequence[tuple[Tensor, ...] | None],
        activation: Clamped | None = None,
    ) -> "SlotWeights":
        """Take each slot's ``gate_up`` ``[2I, H]`` (gate, then up) and ``down`` ``[H, I]``, and behind them the biases
        ``[2I]`` and ``[H]`` of all or of none.

        They are contiguous, alike in shape, dtype and device, and begin at multiples of 16 bytes.
        ``None``: the slot is empty, and no row may be routed to it. At least one is not.
        """
        present = [expert for expert in experts if expert is not None]
        first = present[0]
        for expert in present:
            for weights, like in zip(expert, first, strict=True):
                assert (weights.shape, weights.dtype) == (like.shape, like.dtype)
                assert weights.is_contiguous()
                assert weights.data_ptr() % _ALIGNMENT == 0
        addresses = torch.tensor(
            [
                [0 if expert is None else expert[i].data_ptr() for expert in experts]
                for i in range(len(first))
            ],
            device=first[0].device,
        )
        gate_up, down, *rest = addresses
        biases = (rest[0], rest[1]) if rest else None
        return cls(gate_up, down, biases, activation, first[1].shape[1], tuple(experts))


@dataclass(frozen=True)
class TileShape:
    """The part of a product that one program computes, and its resources."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int


@triton.jit
def _tile(num_blocks, num_tiles, GROUP: tl.constexpr):
    """Block and tile of this program: GROUP blocks take turns before the next tile begins."""
    program = tl.program_id(0)
    first = program // (GROUP * num_tiles) * GROUP
    size = tl.minimum(num_blocks - first, GROUP)
    within = program % (GROUP * num_tiles)
    return first + within % size, within // size


@triton.jit
def _weights(addresses, slot, dtype: tl.constexpr):
    """The address of the weights of ``slot``: a multiple of 16 bytes, as all that torch allocates."""
    address = tl.load(addresses + slot)
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)


@triton.jit
def _with_bias(out, addresses, slot, column, real, dtype: tl.constexpr):
    bias = tl.load(_weights(addresses, slot, dtype) + column, mask=real, other=0.0)
    return out + bias.to(tl.float32)[None, :]


@triton.jit(do_not_specialize=["num_blocks"])
def _gate_up_kernel(
    hidden_states,
    gate_up,
    biases,
    activated,
    choice_of_row,
    slot_of_block,
    rows_of_block,
    hidden_stride,
    num_blocks,
    TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    SIZE: tl.constexpr,
    BIASED: tl.constexpr,
    SLOPE: tl.constexpr,
    LIMIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):
    block, tile = _tile(num_blocks, tl.cdiv(SIZE, COLUMNS), GROUP)
    slot = tl.load(slot_of_block + block)
    if slot < 0:
        return
    in_block = tl.arange(0, ROWS)
    used = in_block < tl.load(rows_of_block + block)
    row = block.to(tl.int64) * ROWS + in_block
    token = tl.load(choice_of_row + row, mask=used, other=0) // TOP_K
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    real = column < SIZE
    depth = tl.arange(0, DEPTH)

    x = hidden_states + token.to(tl.int64)[:, None] * hidden_stride + depth[None, :]
    weights = _weights(gate_up, slot, hidden_states.dtype.element_ty)
    weights += tl.where(real, column, 0)[None, :] * HIDDEN + depth[:, None]
    gate = tl.zeros((ROWS, COLUMNS), tl.float32)
    up = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, HIDDEN, DEPTH):
        if HIDDEN % DEPTH == 0:
            left = tl.load(x + start)
            gate_part = tl.load(weights + start)
            up_part = tl.load(weights + start + SIZE * HIDDEN)
        else:
            inside = start + depth < HIDDEN
            left = tl.load(x + start, mask=inside[None, :], other=0.0)
            gate_part = tl.load(weights + start, mask=inside[:, None], other=0.0)
            up_part = tl.load(weights + start + SIZE * HIDDEN, mask=inside[:, None], other=0.0)
        gate = tl.dot(left, gate_part, gate, input_precision="ieee")
        up = tl.dot(left, up_part, up, input_precision="ieee")
    if BIASED:
        dtype: tl.constexpr = hidden_states.dtype.element_ty
        gate = _with_bias(gate, biases, slot, column, real, dtype)
        up = _with_bias(up, biases, slot, SIZE + column, real, dtype)
    if LIMIT == 0.0:
        out = gate * tl.sigmoid(gate) * up
    else:
        # NaN stays
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        out = gate * tl.sigmoid(SLOPE * gate) * (up + 1.0)
    tl.store(
        activated + row[:, None] * SIZE + column[None, :],
        out.to(activated.dtype.element_ty),
        mask=used[:, None] & real[None, :],
    )


@triton.jit(do_not_specialize=["num_blocks"])
def _down_kernel(
    activated,
    down,
    biases,
    expert_out,
    slot_of_block,
    rows_of_block,
    num_blocks,
    HIDDEN: tl.constexpr,
    SIZE: tl.constexpr,
    BIASED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):
    block, tile = _tile(num_blocks, tl.cdiv(HIDDEN, COLUMNS), GROUP)
    slot = tl.load(slot_of_block + block)
    if slot < 0:
        return
    in_block = tl.arange(0, ROWS)
    used = in_block < tl.load(rows_of_block + block)
    row = block.to(tl.int64) * ROWS + in_block
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    real = column < HIDDEN
    depth = tl.arange(0, DEPTH)

    x = activated + row[:, None] * SIZE + depth[None, :]
    weights = _weights(down, slot, activated.dtype.element_ty)
    weights += tl.where(real, column, 0)[None, :] * SIZE + depth[:, None]
    out = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, SIZE, DEPTH):
        if SIZE % DEPTH == 0:
            left = tl.load(x + start, mask=used[:, None], other=0.0)
            right = tl.load(weights + start)
        else:
            inside = start + depth < SIZE
            left = tl.load(x + start, mask=used[:, None] & inside[None, :], other=0.0)
            right = tl.load(weights + start, mask=inside[:, None], other=0.0)
        out = tl.dot(left, right, out, input_precision="ieee")
    if BIASED:
        out = _with_bias(out, biases, slot, column, real, activated.dtype.element_ty)
    tl.store(
        expert_out + row[:, None] * HIDDEN + column[None, :],
        out.to(expert_out.dtype.element_ty),
        mask=used[:, None] & real[None, :],
    )


@triton.jit
def _combine_kernel(
    expert_out,
    topk_weights,
    row_of_choice,
    combined,
    weights_stride,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_POW2: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real = column < HIDDEN
    choice = tl.arange(0, TOP_K_POW2)
    mine = choice < TOP_K
    weights = tl.load(topk_weights + token * weights_stride + choice, mask=mine, other=0.0)
    rows = tl.load(row_of_choice + token * TOP_K + choice, mask=mine, other=-1)
    waiting = tl.where(rows < 0, 0x7FFFFFFF, rows)
    total = tl.zeros((COLUMNS,), tl.float32)
    # Rows ascend with their slots.
    for _ in tl.static_range(TOP_K):
        row = tl.min(waiting, axis=0)
        weight = tl.sum(tl.where(waiting == row, weights, 0.0), axis=0)
        held = row < 0x7FFFFFFF
        out = tl.load(expert_out + row.to(tl.int64) * HIDDEN + column, mask=real & held, other=0.0)
        total += tl.where(held, weight, 0.0) * out.to(tl.float32)
        waiting = tl.where(waiting == row, 0x7FFFFFFF, waiting)
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
    tiles = tile_shapes(rows_per_slot, hidden, slots.size, hidden_states.dtype)
    order = expert_order(slot_ids.contiguous(), num_slots, tiles[0].rows)
    expert_out = grouped_products(hidden_states, slots, order, top_k, tiles)
    _combine_kernel[(num_rows, triton.cdiv(hidden, _COMBINE_COLUMNS))](
        expert_out,
        topk_weights,
        order.row_of_choice,
        combined,
        topk_weights.stride(0),
        HIDDEN=hidden,
        TOP_K=top_k,
        TOP_K_POW2=triton.next_power_of_2(top_k),
        COLUMNS=min(_COMBINE_COLUMNS, triton.next_power_of_2(hidden)),
    )
    return combined


def grouped_products(
    hidden_states: Tensor,
    slots: SlotWeights,
    order: ExpertOrder,
    top_k: int,
    tiles: tuple[TileShape, TileShape],
) -> Tensor:
    """Compute the unweighted outputs of the rows of ``order``: dtype of the weights, ``[rows, H]``.

    ``tiles`` are the shapes of the two products; both have ``order.block_rows`` rows.
    """
    hidden, size = hidden_states.shape[1], slots.size
    num_rows, num_blocks = len(order.choice_of_row), order.num_blocks
    activated = hidden_states.new_empty(num_rows, size)
    expert_out = hidden_states.new_empty(num_rows, hidden)
    blocks = (order.slot_of_block, order.rows_of_block)
    # Without biases they are not read.
    biases = slots.biases or (slots.gate_up, slots.down)
    slope, limit = slots.activation or (0.0, 0.0)
    _gate_up_kernel[(num_blocks * triton.cdiv(size, tiles[0].columns),)](
        hidden_states,
        slots.gate_up,
        biases[0],
        activated,
        order.choice_of_row,
        *blocks,
        hidden_states.stride(0),
        num_blocks,
        TOP_K=top_k,
        HIDDEN=hidden,
        SIZE=size,
        BIASED=slots.biases is not None,
        SLOPE=slope,
        LIMIT=limit,
        **_launch(tiles[0]),
    )
    _down_kernel[(num_blocks * triton.cdiv(hidden, tiles[1].columns),)](
        activated,
        slots.down,
        biases[1],
        expert_out,
        *blocks,
        num_blocks,
        HIDDEN=hidden,
        SIZE=size,
        BIASED=slots.biases is not None,
        **_launch(tiles[1]),
    )
    return expert_out


def tile_shapes(
    rows_per_slot: float, hidden: int, size: int, dtype: torch.dtype
) -> tuple[TileShape, TileShape]:
    """Choose tiles for the two products, by the number of rows that a slot gets on average.

    With few rows the products do little but read weights: many narrow tiles. With many rows, tiles
    are wide enough for the tensor cores to be the limit. float32 has small tiles, and no tensor cores.
    ``bench kernels`` compares tiles on a GPU (``tiles_us``).
    """
    if dtype == torch.float32:
        first = second = (16, 32, 32, 4, 2)
    elif rows_per_slot <= 8:
        first, second = (16, 32, 128, 4, 4), (16, 64, 128, 4, 4)
    elif rows_per_slot <= 32:
        first, second = (32, 64, 128, 4, 3), (32, 128, 128, 4, 3)
    elif rows_per_slot <= 64:
        first, second = (64, 64, 64, 4, 4), (64, 128, 64, 4, 4)
    elif is_roomy():
        first, second = (128, 128, 64, 8, 4), (128, 256, 64, 8, 4)
    else:
        first = second = (128, 128, 64, 8, 3)
    return _fitted(TileShape(*first), size, hidden), _fitted(TileShape(*second), hidden, size)


def _fitted(tile: TileShape, width: int, depth: int) -> TileShape:
    """The tile, no wider or deeper than the product; 16 is the least that a matrix unit takes."""
    columns = max(16, min(tile.columns, triton.next_power_of_2(width)))
    deep = max(16, min(tile.depth, triton.next_power_of_2(depth)))
    return TileShape(tile.rows, columns, deep, tile.num_warps, tile.num_stages)


def _launch(tile: TileShape) -> dict[str, int]:
    return {
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "DEPTH": tile.depth,
        "GROUP": _GROUP,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
