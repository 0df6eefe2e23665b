"""Where one step's rows go in the KV cache and what they attend to; worked out once a step, used by every layer."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from moesaic.models.paged_plan import PagedPlan, plan_paged
from moesaic.models.step_batch import StepBatch


@dataclass(frozen=True)
class SingleRows:
    """The sequences with one row in this step, padded to the longest."""

    rows: Tensor  # int64 [B]
    slots: Tensor  # int64 [B, L]; padding repeats the sequence's own first slot
    mask: Tensor  # bool [B, 1, 1, L]: what a row attends to


@dataclass(frozen=True)
class RowRun:
    """Rows of one sequence that are attended together."""

    start: int
    stop: int
    slots: Tensor  # int64 [L]
    mask: Tensor | None  # bool [n, L]; None: the rows are the whole sequence, plainly causal
    padding: tuple[int, int] = (0, 0)  # rows of nothing before and after, counted in n


@dataclass(frozen=True)
class AttentionPlan:
    """What the rows of a step write and read."""

    write_slots: Tensor  # int64 [T]
    single: SingleRows | None
    runs: tuple[RowRun, ...]
    paged: PagedPlan | None = None  # on a GPU, in place of the two above


def plan_attention(
    batch: StepBatch,
    block_size: int,
    window: int | None,
    device: torch.device,
    deterministic: bool = False,
) -> AttentionPlan:
    """Work out the plan of ``batch``; a row sees its own and the ``window - 1`` positions before
    it, or all of them.

    A product's last bits depend on its shape. With ``deterministic`` every row is attended in a
    shape that depends on its position alone: the rows of its block, those of other steps left
    empty, over all positions up to the block's end.

    The plan's tensors are on ``device``.
    """
    assert len(batch.sequence_rows) == len(batch.block_tables)
    if device.type == "cuda":
        write_slots, paged = plan_paged(batch, block_size, window, device)
        return AttentionPlan(write_slots, None, (), paged)
    bounds = torch.tensor([0, *batch.sequence_rows]).cumsum(0).tolist()
    assert bounds[-1] == len(batch.positions)
    lengths: list[int] = (batch.positions[torch.tensor(bounds[1:]) - 1] + 1).tolist()

    runs: list[RowRun] = []
    singles: list[int] = []
    write_slots = torch.empty(bounds[-1], dtype=torch.int64, device=device)
    for sequence, (start, stop) in enumerate(pairwise(bounds)):
        if deterministic:
            slots = _slots(torch.tensor([batch.block_tables[sequence]], device=device), block_size)
            slots = slots[0, : lengths[sequence]]
            write_slots[start:stop] = slots[start - stop :]
            runs += _tiles(start, stop, slots, block_size, window)
            continue
        if stop - start == 1:
            singles.append(sequence)
            continue
        run = _row_run(
            start, stop, batch.block_tables[sequence], lengths[sequence], block_size, window, device
        )
        write_slots[start:stop] = run.slots[start - stop :]
        runs.append(run)
    single = None
    if singles:
        single, written = _single_rows(
            [bounds[i] for i in singles],
            [batch.block_tables[i] for i in singles],
            [lengths[i] for i in singles],
            block_size,
            window,
            device,
        )
        write_slots[single.rows] = written
    return AttentionPlan(write_slots, single, tuple(runs))


def _row_run(
    start: int,
    stop: int,
    block_table: list[int],
    length: int,
    block_size: int,
    window: int | None,
    device: torch.device,
) -> RowRun:
    slots = _slots(torch.tensor([block_table], device=device), block_size)[0, :length]
    assert len(slots) == length
    rows = stop - start
    if rows == length and (window is None or window >= length):
        return RowRun(start, stop, slots, None)
    position = torch.arange(length - rows, length, device=device).unsqueeze(1)
    return RowRun(start, stop, slots, _causal(position, length, window))


def _tiles(
    start: int, stop: int, slots: Tensor, block_size: int, window: int | None
) -> Iterator[RowRun]:
    length = len(slots)
    first = length - (stop - start)  # position of the row ``start``
    for tile in range(first // block_size, -(-length // block_size)):
        bounds = (tile * block_size, (tile + 1) * block_size)
        begin, end = max(first, bounds[0]), min(length, bounds[1])
        # What is not there yet reads the sequence's own first token, and is masked.
        reach = torch.cat((slots[: bounds[1]], slots[:1].expand(max(0, bounds[1] - length))))
        position = torch.arange(*bounds, device=slots.device).unsqueeze(1)
        yield RowRun(
            start + begin - first,
            start + end - first,
            reach,
            _causal(position, bounds[1], window),
            padding=(begin - bounds[0], bounds[1] - end),
        )


def _causal(position: Tensor, length: int, window: int | None) -> Tensor:
    column = torch.arange(length, device=position.device)
    mask = column <= position
    if window is not None:
        mask &= column > position - window
    return mask


def _single_rows(
    rows: list[int],
    block_tables: list[list[int]],
    lengths: list[int],
    block_size: int,
    window: int | None,
    device: torch.device,
) -> tuple[SingleRows, Tensor]:
    longest = max(lengths)
    num_blocks = -(-longest // block_size)
    padded = [(table + table[:1] * num_blocks)[:num_blocks] for table in block_tables]
    slots = _slots(torch.tensor(padded, device=device), block_size)[:, :longest]
    length = torch.tensor(lengths, device=device).unsqueeze(1)
    column = torch.arange(longest, device=device)
    seen = column < length  # [B, L]
    write_slots = slots.gather(1, length - 1).squeeze(1)
    # Padding reads the sequence's own first token: masked, yet a NaN in another sequence's rows
    # would still spread.
    slots = torch.where(seen, slots, slots[:, :1])
    if window is not None:
        seen = seen & (column >= length - window)
    single = SingleRows(torch.tensor(rows, device=device), slots, seen[:, None, None, :])
    return single, write_slots


def _slots(block_tables: Tensor, block_size: int) -> Tensor:
    """``[B, blocks]`` -> ``[B, blocks * block_size]``: the cache rows of the blocks, in order."""
    offsets = torch.arange(block_size, device=block_tables.device)
    return (block_tables.unsqueeze(-1) * block_size + offsets).flatten(1)
