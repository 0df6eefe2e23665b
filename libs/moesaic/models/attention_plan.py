"""Where one step's rows go in the KV cache and what they attend to; worked out once a step, used by every layer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from moesaic.kernels.paged_attention import KVLayout, PagedRows, paged_attention
from moesaic.models.step_batch import StepBatch


@dataclass(frozen=True)
class AttentionPlan:
    """What the rows of a step write and read in a layer."""

    write_slots: Tensor  # int64 [T]; -1: not kept
    groups: tuple[PagedRows, ...]  # those that attend, in the calls that they are best computed in
    block_size: int
    window: int | None  # a row sees its own and the ``window - 1`` positions before it; None: all
    attending: Tensor | None = None  # int64 [A]: the rows that attend; None: all

    def attend(self, queries: Tensor, cached: Tensor, layout: KVLayout, scale: float) -> Tensor:
        """What the ``queries`` ``[A, heads, key_dim]`` attend to: ``[A, heads * value_dim]``."""
        out = queries.new_empty(*queries.shape[:2], layout.value_dim)
        for rows in self.groups:
            paged_attention(queries, cached, rows, layout, self.block_size, scale, self.window, out)
        return out.flatten(1)


@dataclass(frozen=True)
class StepPlan:
    """The plans of a step. Of what comes out of the last layer, nothing but the logits is ever read: only
    rows whose logits are wanted need attend in it, while all must write what later steps attend to."""

    layer: AttentionPlan  # of every layer but the last
    last: AttentionPlan


def plan_attention(
    batch: StepBatch, block_size: int, window: int | None, device: torch.device
) -> StepPlan:
    """The plan of ``batch`` over a cache with blocks of ``block_size`` tokens."""
    counts, wanted = batch.sequence_rows, batch.wanted
    assert len(counts) == len(wanted) == len(batch.block_tables)
    bounds = [0, *accumulate(counts)]
    assert bounds[-1] == len(batch.positions)
    lengths = (batch.positions[torch.tensor(bounds[1:]) - 1] + 1).tolist()
    tables = _padded(batch.block_tables, [-(-length // block_size) for length in lengths])

    sequences = torch.arange(len(counts))
    if bounds[-1] > len(counts):
        sequences = sequences.repeat_interleave(torch.tensor(counts))
    block = tables[sequences, batch.positions // block_size]
    write_slots = block * block_size + batch.positions % block_size

    layer = AttentionPlan(
        write_slots.to(device, torch.int64),
        _groups(counts, lengths, tables, device),
        block_size,
        window,
    )
    if wanted == counts:
        return StepPlan(layer, layer)
    assert all(0 <= few <= count for few, count in zip(wanted, counts, strict=True))
    attending = [
        row for end, few in zip(bounds[1:], wanted, strict=True) for row in range(end - few, end)
    ]
    last = replace(
        layer,
        groups=_groups(wanted, lengths, tables, device),
        attending=torch.tensor(attending, dtype=torch.int64).to(device),
    )
    return StepPlan(layer, last)


def _groups(
    counts: Sequence[int], lengths: Sequence[int], tables: Tensor, device: torch.device
) -> tuple[PagedRows, ...]:
    """The last ``counts`` tokens of each sequence, as the rows of one tensor."""
    facts = torch.tensor([[0, *accumulate(counts)][:-1], counts, lengths], dtype=torch.int32)
    everything = list(range(len(counts)))
    groups = [[i for i in everything if counts[i]]]
    if device.type == "cuda":  # single rows have a launch of their own there
        singles = [i for i in everything if counts[i] == 1]
        groups = [singles, [i for i in everything if counts[i] > 1]]
    return tuple(
        _rows(facts, tables, None if group == everything else group, device)
        for group in groups
        if group
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
