# Grouped products: the two matrices of gated experts, and those of linear layers whose weights are codes.
#   Grid       blocks of rows times tiles of columns, GROUP blocks side by side, so that a slot's weights stay in
#              the L2 cache while its blocks pass.
#   Layout     hidden_states [T, H]; a slot's gate_up [2I, H] and down [H, I] lie anywhere, found by
#              address, so that one expert changes without the others being copied; activated
#              [rows, I] and expert_out [rows, H] in the order of expert_order, in hidden_states' dtype.
#   Cost       2 * 3 * R * H * I operations. Where a slot's rows fit one block its weights are read
#              once: the floor of a decode step. 2 * R * (I + H) numbers go through memory between.
#   Order      products accumulate in float32, then biases; the activated is rounded once.
"""Products of rows with the weights of their slots, for CUDA."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesaic.kernels.coded_matrix import CodedMatrix, addresses
from moesaic.kernels.held_bytes import WeightForm
from moesaic.kernels.packed_experts import Clamped
from moesaic.kernels.triton.expert_order import FEW, ExpertOrder, choices_together
from moesaic.kernels.triton.shared_memory import is_roomy
from moesaic.kernels.triton.weight_tiles import finished, tile, tile_at

_GROUP = 8
_PROGRAMS = 128
_ALIGNMENT = 16  # bytes; torch's allocations begin at multiples of far more


class HeldExpert(Protocol):
    """An expert as a GPU holds it: ``PlainMLP`` or ``CodedMLP``."""

    @property
    def parts(self) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        """The parts of gate_up ``[2I, H]``, gate before up, and of down ``[H, I]``; see ``coded_matrix.PARTS``."""
        ...

    @property
    def form(self) -> WeightForm | None:
        """The form of codes; None: numbers."""
        ...

    @property
    def size(self) -> int:
        """Return ``I``."""
        ...

    @property
    def activation(self) -> Clamped | None:
        """See ``Clamped``."""
        ...


@dataclass(frozen=True)
class SlotWeights:
    """The experts of ``S`` slots, as the kernels read them."""

    gate_up: Tensor  # int64 [S, 5]: addresses of parts, see weight_tiles; 0: the slot is empty
    down: Tensor
    form: WeightForm | None  # of codes; None: numbers
    biased: bool
    activation: Clamped | None
    size: int  # I
    held: tuple[object, ...]  # what is at the addresses, kept alive

    @classmethod
    def of(cls, experts: Sequence[HeldExpert | None]) -> "SlotWeights":
        """Take the expert of each slot; ``None``: it is empty, and no row may be routed to it. At least one is not.

        Their parts are contiguous, alike in shape, dtype and device; weights begin at multiples of 16 bytes.
        """
        parts = [({}, {}) if expert is None else expert.parts for expert in experts]
        some = next(expert for expert in experts if expert is not None)
        for of_expert in filter(all, parts):
            for own, like in zip(of_expert, some.parts, strict=True):
                assert own["panels"].data_ptr() % _ALIGNMENT == 0
                assert own.keys() == like.keys()
                for name, part in own.items():
                    assert (part.shape, part.dtype) == (like[name].shape, like[name].dtype)
                    assert part.is_contiguous()
        device, biased = some.parts[1]["panels"].device, "bias" in some.parts[1]
        gate_up, down = (
            torch.tensor(addresses(of_all), device=device) for of_all in zip(*parts, strict=True)
        )
        held = tuple(experts)
        return cls(gate_up, down, some.form, biased, some.activation, some.size, held)


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
def _rows_of(
    block,
    slot_of_block,
    rows_of_block,
    num_choices,
    num_slots,
    ORDER: tl.constexpr,
    ROWS: tl.constexpr,
    CHOICES: tl.constexpr,
):
    """The slot of a block, -1: it is not needed; the rows of ``activated`` that are computed, and which there are."""
    in_block = tl.arange(0, ROWS)
    row = block.to(tl.int64) * ROWS + in_block
    if ORDER == "sorted":
        slot = tl.load(slot_of_block + block)
        return slot, row, in_block < tl.load(rows_of_block + block)
    elif ORDER == "few":
        slot, row, used = choices_together(
            slot_of_block, block, num_choices, num_slots, ROWS, CHOICES
        )
        return slot, row.to(tl.int64), used
    else:
        return 0, row, row < num_choices


@triton.jit(do_not_specialize=["num_blocks", "num_choices", "num_slots"])
def _gate_up_kernel(
    hidden_states,
    gate_up,
    activated,
    choice_of_row,
    slot_of_block,
    rows_of_block,
    hidden_stride,
    num_blocks,
    num_choices,
    num_slots,
    TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    SIZE: tl.constexpr,
    ORDER: tl.constexpr,
    CHOICES: tl.constexpr,
    KIND: tl.constexpr,
    SHARED: tl.constexpr,
    BIASED: tl.constexpr,
    SLOPE: tl.constexpr,
    LIMIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):
    dtype: tl.constexpr = hidden_states.dtype.element_ty
    block, tile_idx = _tile(num_blocks, tl.cdiv(SIZE, COLUMNS), GROUP)
    slot, row, used = _rows_of(
        block, slot_of_block, rows_of_block, num_choices, num_slots, ORDER, ROWS, CHOICES
    )
    if slot < 0:
        return
    choice = row.to(tl.int32)
    if ORDER == "sorted":
        choice = tl.load(choice_of_row + row, mask=used, other=0)
    column = tile_idx * COLUMNS + tl.arange(0, COLUMNS)
    real = column < SIZE
    depth = tl.arange(0, DEPTH)

    x = hidden_states + (choice // TOP_K).to(tl.int64)[:, None] * hidden_stride + depth[None, :]
    at, scales, zeros = tile_at(
        gate_up, slot, tl.where(real, column, 0), HIDDEN, KIND, SHARED, DEPTH, dtype
    )
    gate = tl.zeros((ROWS, COLUMNS), tl.float32)
    up = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, HIDDEN, DEPTH):
        if HIDDEN % DEPTH == 0:
            left = tl.load(x + start)
        else:
            left = tl.load(x + start, mask=(start + depth < HIDDEN)[None, :], other=0.0)
        gate_part = tile(at, scales, zeros, start, 0, HIDDEN, KIND, SHARED, DEPTH, dtype)
        up_part = tile(at, scales, zeros, start, SIZE, HIDDEN, KIND, SHARED, DEPTH, dtype)
        gate = tl.dot(left, gate_part, gate, input_precision="ieee")
        up = tl.dot(left, up_part, up, input_precision="ieee")
    gate = finished(gate, gate_up, slot, column, real, KIND, BIASED, dtype)
    up = finished(up, gate_up, slot, SIZE + column, real, KIND, BIASED, dtype)
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


@triton.jit(do_not_specialize=["num_blocks", "num_choices", "num_slots"])
def _down_kernel(
    activated,
    down,
    expert_out,
    slot_of_block,
    rows_of_block,
    num_blocks,
    num_choices,
    num_slots,
    HIDDEN: tl.constexpr,
    SIZE: tl.constexpr,
    ORDER: tl.constexpr,
    CHOICES: tl.constexpr,
    KIND: tl.constexpr,
    SHARED: tl.constexpr,
    BIASED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):
    dtype: tl.constexpr = activated.dtype.element_ty
    block, tile_idx = _tile(num_blocks, tl.cdiv(HIDDEN, COLUMNS), GROUP)
    slot, row, used = _rows_of(
        block, slot_of_block, rows_of_block, num_choices, num_slots, ORDER, ROWS, CHOICES
    )
    if slot < 0:
        return
    column = tile_idx * COLUMNS + tl.arange(0, COLUMNS)
    real = column < HIDDEN
    depth = tl.arange(0, DEPTH)

    x = activated + row[:, None] * SIZE + depth[None, :]
    at, scales, zeros = tile_at(
        down, slot, tl.where(real, column, 0), SIZE, KIND, SHARED, DEPTH, dtype
    )
    out = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, SIZE, DEPTH):
        if SIZE % DEPTH == 0:
            left = tl.load(x + start, mask=used[:, None], other=0.0)
        else:
            inside = start + depth < SIZE
            left = tl.load(x + start, mask=used[:, None] & inside[None, :], other=0.0)
        right = tile(at, scales, zeros, start, 0, SIZE, KIND, SHARED, DEPTH, dtype)
        out = tl.dot(left, right, out, input_precision="ieee")
    out = finished(out, down, slot, column, real, KIND, BIASED, dtype)
    tl.store(
        expert_out + row[:, None] * HIDDEN + column[None, :],
        out.to(expert_out.dtype.element_ty),
        mask=used[:, None] & real[None, :],
    )


def grouped_products(
    hidden_states: Tensor,
    slots: SlotWeights,
    order: ExpertOrder,
    top_k: int,
    tiles: tuple[TileShape, TileShape],
) -> Tensor:
    """Compute the unweighted outputs of the rows of ``order``: dtype of the rows, ``[rows, H]``.

    ``tiles`` are the shapes of the two products; both have ``order.block_rows`` rows.
    """
    hidden, size = hidden_states.shape[1], slots.size
    num_rows, num_blocks = len(order.choice_of_row), order.num_blocks
    activated = hidden_states.new_empty(num_rows, size)
    expert_out = hidden_states.new_empty(num_rows, hidden)
    blocks = (order.slot_of_block, order.rows_of_block)
    counts = num_blocks, len(order.row_of_choice), len(slots.gate_up)
    slope, limit = slots.activation or (0.0, 0.0)
    alike = {
        "HIDDEN": hidden,
        "SIZE": size,
        "ORDER": "few" if order.of_few else "sorted",
        **_of_form(slots.form, biased=slots.biased),
    }
    _gate_up_kernel[(num_blocks * triton.cdiv(size, tiles[0].columns),)](
        hidden_states,
        slots.gate_up,
        activated,
        order.choice_of_row,
        *blocks,
        hidden_states.stride(0),
        *counts,
        TOP_K=top_k,
        SLOPE=slope,
        LIMIT=limit,
        **alike,
        **_launch(tiles[0]),
    )
    _down_kernel[(num_blocks * triton.cdiv(hidden, tiles[1].columns),)](
        activated, slots.down, expert_out, *blocks, *counts, **alike, **_launch(tiles[1])
    )
    return expert_out


def linear(x: Tensor, table: Tensor, matrix: CodedMatrix) -> Tensor:
    """Multiply ``x`` ``[T, in]`` by codes, and add their bias if they have one.

    Args:
        x: float32 or bfloat16, contiguous.
        table: addresses of the parts, int64 ``[1, 5]``, see weight_tiles.
        matrix: ``[out, in]``, on the device of ``x``.

    Returns:
        ``[T, out]``, dtype of ``x``.
    """
    (num_out, num_in), num_rows = matrix.shape, len(x)
    assert x.shape[1] == num_in
    assert x.is_contiguous()
    out = x.new_empty(num_rows, num_out)
    if not num_rows:
        return out
    shape = tile_shapes(num_rows, num_out, num_in, x.dtype, coded=True)[1]
    if num_rows <= shape.rows:
        # Weights are read by as many multiprocessors as a large GPU has.
        narrow = max(16, triton.next_power_of_2(num_out // _PROGRAMS))
        shape = replace(shape, columns=min(shape.columns, narrow))
    num_blocks = triton.cdiv(num_rows, shape.rows)
    # It has one slot, and its rows lie in their order.
    _down_kernel[(num_blocks * triton.cdiv(num_out, shape.columns),)](
        x,
        table,
        out,
        table,
        table,
        num_blocks,
        num_rows,
        1,
        HIDDEN=num_out,
        SIZE=num_in,
        ORDER="all",
        **_of_form(matrix.form, biased="bias" in matrix.parts),
        **_launch(shape),
    )
    return out


def _of_form(form: WeightForm | None, *, biased: bool) -> dict[str, object]:
    """Say how the kernels read weights of a form; None: numbers."""
    if form is None:
        kind = "plain"
    elif form.kind == "fp8":
        kind = "fp8"
    else:
        kind = "levels" if form.levels else "zeros" if form.zeros else "int4"
    return {
        "KIND": kind,
        "SHARED": form.group if form else 0,
        "BIASED": biased,
        "CHOICES": FEW,
    }


def tile_shapes(
    rows_per_slot: float, hidden: int, size: int, dtype: torch.dtype, *, coded: bool = False
) -> tuple[TileShape, TileShape]:
    """Choose tiles for the two products, by the number of rows that a slot gets on average.

    With few rows the products do little but read weights: many narrow tiles. With many rows, tiles
    are wide enough for the tensor cores to be the limit. float32 has small tiles, and no tensor cores.
    Codes become numbers in registers, so gates and ups of many rows are narrower: none may spill.
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
    if coded and rows_per_slot > 64:
        first = (128, 64, 64, 8, 4)
    return _fitted(TileShape(*first), size, hidden), _fitted(TileShape(*second), hidden, size)


def _fitted(tile: TileShape, width: int, depth: int) -> TileShape:
    """The tile, no wider or deeper than the product; 16 is the least that a matrix unit takes."""
    columns = max(16, min(tile.columns, triton.next_power_of_2(width)))
    deep, stages = max(16, min(tile.depth, triton.next_power_of_2(depth))), tile.num_stages
    # 2,880 inputs, of gpt-oss, are 45 whole tiles then, without masks; as many bytes are under way.
    if deep == 128 and depth % 128 and not depth % 64:
        deep, stages = 64, 2 * stages
    return TileShape(tile.rows, columns, deep, tile.num_warps, stages)


def _launch(tile: TileShape) -> dict[str, int]:
    return {
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "DEPTH": tile.depth,
        "GROUP": _GROUP,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
