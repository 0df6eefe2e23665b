"""Where one step's rows go in the KV cache and what they attend to; worked out once a step, used by every layer."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from moesaic.kernels.paged_attention import KVLayout, PagedRows, paged_attention
from moesaic.models.step_batch import StepBatch


@dataclass(frozen=True)
class AttentionPlan:
    """What the rows of a step write and read."""

    write_slots: Tensor  # int64 [T]; -1: not kept
    groups: tuple[PagedRows, ...]  # the rows, in the calls that they are best computed in
    block_size: int
    window: int | None  # a row sees its own and the ``window - 1`` positions before it; None: all

    def attend(self, queries: Tensor, cached: Tensor, layout: KVLayout, scale: float) -> Tensor:
        """What the ``queries`` ``[T, heads, key_dim]`` attend to: ``[T, heads * value_dim]``."""
        out = queries.new_empty(*queries.shape[:2], layout.value_dim)
        for rows in self.groups:
            paged_attention(queries, cached, rows, layout, self.block_size, scale, self.window, out)
        return out.flatten(1)


def plan_attention(
    batch: StepBatch, block_size: int, window: int | None, device: torch.device
) -> AttentionPlan:
    """The plan of ``batch`` over a cache with blocks of ``block_size`` tokens."""
    counts = batch.sequence_rows
    assert len(counts) == len(batch.block_tables)
    bounds = [0, *accumulate(counts)]
    assert bounds[-1] == len(batch.positions)
    lengths = (batch.positions[torch.tensor(bounds[1:]) - 1] + 1).tolist()
    tables = _padded(batch.block_tables, [-(-length // block_size) for length in lengths])

    sequences = torch.arange(len(counts))
    if bounds[-1] > len(counts):
        sequences = sequences.repeat_interleave(torch.tensor(counts))
    block = tables[sequences, batch.positions // block_size]
    write_slots = block * block_size + batch.positions % block_size

    facts = torch.tensor([bounds[:-1], counts, lengths], dtype=torch.int32)
    everything = list(range(len(counts)))
    groups = [everything]
    if device.type == "cuda":  # single rows have a launch of their own there
        singles = [i for i in everything if counts[i] == 1]
        groups = [singles, [i for i in everything if counts[i] > 1]]
    return AttentionPlan(
        write_slots.to(device, torch.int64),
        tuple(
            _rows(facts, tables, None if group == everything else group, device)
            for group in groups
            if group
        ),
        block_size,
        window,
    )


def _rows(
    facts: Tensor, tables: Tensor, mine: Sequence[int] | None, device: torch.device
) -> PagedRows:
    if mine is not None:
        facts, tables = facts[:, mine], tables[mine]
    _, max_rows, max_length = facts.amax(dim=1).tolist()
    first_rows, num_rows, lengths = facts.to(device)  # one copy for the three
    return PagedRows(first_rows, num_rows, lengths, tables.to(device), max_rows, max_length)


def _padded(block_tables: Sequence[Sequence[int]], num_blocks: Sequence[int]) -> Tensor:
    """int32 ``[B, M]``: the blocks in use, zeros behind them."""
    width = max(num_blocks)
    rows = []
    for table, used in zip(block_tables, num_blocks, strict=True):
        assert len(table) >= used
        rows.append([*table[:used], *[0] * (width - used)])
    return torch.tensor(rows, dtype=torch.int32)
