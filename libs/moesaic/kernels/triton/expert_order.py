# Expert order: sort the routed choices by slot, into blocks of rows that share one slot.
#   Grid       count: (chunks,); place: (chunks,), or more where there are more blocks to describe.
#   Layout     slot_ids [C] (C = T * k choices, flat); a slot's rows begin at a multiple of
#              block_rows, and the rows that fill its last block up hold nothing.
#   Cost       C * S comparisons, twice; two launches. The host is never asked: it bounds the number
#              of blocks instead, and the blocks that are not needed are marked so.
#   Order      within a slot by choice: a counting sort, stable, without atomics.
#   Reference  expert_order_reference, in its test; equal in every element that is defined.
"""The order of routed choices: the block and the row in which each is computed."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

FEW = 128
"""Choices that are not sorted: each program of the products compares them all."""
_CHUNK = 512  # choices a program sorts
_BLOCKS = 64  # blocks a program describes
_TILE = 8192  # comparisons at a time: what eight warps hold in registers
# What differs from step to step, or by placement, is not specialised on: each kind of number would be
# compiled anew.


@dataclass(frozen=True)
class ExpertOrder:
    """The places in which the choices of a step are computed."""

    block_rows: int
    slot_of_block: Tensor  # int32 [blocks], ascending; -1: the block is not needed
    rows_of_block: Tensor  # int32 [blocks]: how many of its rows are in use, the first ones
    choice_of_row: Tensor  # int32 [blocks * block_rows]; undefined where the row is not in use
    row_of_choice: Tensor  # int32 [C]; -1 where the choice is not held here
    of_few: bool = False  # as ``order_of_few`` makes it: all four are the slots of the choices

    @property
    def num_blocks(self) -> int:
        """Number of blocks with room."""
        return self.slot_of_block.shape[0]


@triton.jit
def _load_slots(slot_ids, choice, num_choices, num_slots):
    slot = tl.load(slot_ids + choice, mask=choice < num_choices, other=-1).to(tl.int32)
    return tl.where(slot < num_slots, slot, -1)


@triton.jit(do_not_specialize=["num_choices", "num_slots"])
def _count_kernel(
    slot_ids,
    counts,
    num_choices,
    num_slots,
    SLOTS_POW2: tl.constexpr,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
):
    chunk = tl.program_id(0)
    slot = tl.arange(0, SLOTS_POW2)
    count = tl.zeros((SLOTS_POW2,), tl.int32)
    for start in range(0, CHUNK, PART):
        choice = chunk * CHUNK + start + tl.arange(0, PART)
        chosen = _load_slots(slot_ids, choice, num_choices, num_slots)
        count += tl.sum((chosen[:, None] == slot[None, :]).to(tl.int32), axis=0)
    tl.store(counts + chunk * SLOTS_POW2 + slot, count)


@triton.jit(do_not_specialize=["num_choices", "num_slots", "num_chunks", "num_blocks"])
def _place_kernel(
    slot_ids,
    counts,
    slot_of_block,
    rows_of_block,
    choice_of_row,
    row_of_choice,
    num_choices,
    num_slots,
    num_chunks,
    num_blocks,
    BLOCK_ROWS: tl.constexpr,
    SLOTS_POW2: tl.constexpr,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCKS_PART: tl.constexpr,
):
    program = tl.program_id(0)
    slot = tl.arange(0, SLOTS_POW2)
    total = tl.zeros((SLOTS_POW2,), tl.int32)
    # Of them, in the chunks before this one.
    before = tl.zeros((SLOTS_POW2,), tl.int32)
    for chunk in range(num_chunks):
        count = tl.load(counts + chunk * SLOTS_POW2 + slot)
        total += count
        before += tl.where(chunk < program, count, 0)
    blocks = (total + BLOCK_ROWS - 1) // BLOCK_ROWS
    end = tl.cumsum(blocks, axis=0)
    first_row = (end - blocks) * BLOCK_ROWS

    for start in range(0, BLOCKS, BLOCKS_PART):
        block = program * BLOCKS + start + tl.arange(0, BLOCKS_PART)
        owner = tl.sum((end[None, :] <= block[:, None]).to(tl.int32), axis=1)
        end_row = tl.sum(
            tl.where(slot[None, :] == owner[:, None], (first_row + total)[None, :], 0), axis=1
        )
        rows = tl.minimum(tl.maximum(end_row - block * BLOCK_ROWS, 0), BLOCK_ROWS)
        owner = tl.where(owner < SLOTS_POW2, owner, -1)
        tl.store(slot_of_block + block, owner, mask=block < num_blocks)
        tl.store(rows_of_block + block, rows, mask=block < num_blocks)

    next_row = first_row + before
    for start in range(0, CHUNK, PART):
        choice = program * CHUNK + start + tl.arange(0, PART)
        chosen = _load_slots(slot_ids, choice, num_choices, num_slots)
        match = (chosen[:, None] == slot[None, :]).to(tl.int32)  # [PART, S], at most one 1 a row
        earlier = tl.cumsum(match, axis=0) - match
        row = tl.sum(match * (next_row[None, :] + earlier), axis=1)
        tl.store(row_of_choice + choice, tl.where(chosen >= 0, row, -1), mask=choice < num_choices)
        tl.store(choice_of_row + row, choice, mask=chosen >= 0)
        next_row += tl.sum(match, axis=0)


def expert_order(slot_ids: Tensor, num_slots: int, block_rows: int) -> ExpertOrder:
    """Sort the choices ``slot_ids`` (int32 or int64, contiguous, any shape) into blocks.

    A slot outside ``0..num_slots-1`` is not held here.
    """
    num_choices = slot_ids.numel()
    num_blocks = max_blocks(num_choices, num_slots, block_rows)
    num_chunks = triton.cdiv(num_choices, _CHUNK)
    slots_pow2 = max(16, triton.next_power_of_2(num_slots))
    part = min(_CHUNK, max(1, _TILE // slots_pow2))

    def empty(*shape: int) -> Tensor:
        return slot_ids.new_empty(shape, dtype=torch.int32)

    counts = empty(num_chunks, slots_pow2)
    order = ExpertOrder(
        block_rows,
        slot_of_block=empty(num_blocks),
        rows_of_block=empty(num_blocks),
        choice_of_row=empty(num_blocks * block_rows),
        row_of_choice=empty(num_choices),
    )
    if not num_choices:
        return order
    assert slot_ids.is_contiguous()
    shape = {"SLOTS_POW2": slots_pow2, "CHUNK": _CHUNK, "PART": part, "num_warps": 8}
    _count_kernel[(num_chunks,)](slot_ids, counts, num_choices, num_slots, **shape)
    _place_kernel[(max(num_chunks, triton.cdiv(num_blocks, _BLOCKS)),)](
        slot_ids,
        counts,
        order.slot_of_block,
        order.rows_of_block,
        order.choice_of_row,
        order.row_of_choice,
        num_choices,
        num_slots,
        num_chunks,
        num_blocks,
        BLOCK_ROWS=block_rows,
        BLOCKS=_BLOCKS,
        BLOCKS_PART=min(_BLOCKS, part),
        **shape,
    )
    return order


def order_of_few(slot_ids: Tensor, block_rows: int) -> ExpertOrder:
    """Leave at most ``FEW`` choices in their order, without a launch: each is a block, and its own row.

    Each program of the products finds the choices that share its block's slot; see ``choices_together``.
    """
    assert slot_ids.numel() <= FEW
    slots = slot_ids.flatten()
    return ExpertOrder(block_rows, slots, slots, slots, slots, of_few=True)


@triton.jit
def choices_together(
    slot_ids, block, num_choices, num_slots, ROWS: tl.constexpr, CHOICES: tl.constexpr
):
    """The slot of choice ``block``, up to ``ROWS`` choices of it from this one on, and which of them there are.

    The slot is -1 if it is not held here, or if the block of an earlier choice has this one.
    """
    choice = tl.arange(0, CHOICES)
    slots = _load_slots(slot_ids, choice, num_choices, num_slots)
    slot = tl.max(tl.where(choice == block, slots, -1), axis=0)
    same = (slots == slot).to(tl.int32)
    rank = tl.cumsum(same, axis=0) - same
    first = tl.sum(tl.where(choice == block, rank, 0), axis=0)
    wanted = first + tl.arange(0, ROWS)
    match = (same[None, :] > 0) & (rank[None, :] == wanted[:, None])
    together = tl.sum(tl.where(match, choice[None, :], 0), axis=1)
    used = tl.sum(match.to(tl.int32), axis=1) > 0
    return tl.where(first % ROWS == 0, slot, -1), together, used


def max_blocks(num_choices: int, num_slots: int, block_rows: int) -> int:
    """Return the most blocks that ``num_choices`` choices can need."""
    active = min(num_choices, num_slots)
    return (num_choices + active * (block_rows - 1)) // block_rows
