"""The plan of attention: the cached rows that a step writes and attends to, made once and used by every layer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moesaic.kernels.paged_attention import paged_attention
from moesaic.kernels.paged_rows import KVLayout, PagedRows
from moesaic.models.layers.step_batch import StepBatch


@dataclass(frozen=True)
class AttentionPlan:
    """The cached rows that a step writes and reads in a layer."""

    write_offsets: Tensor  # int64 [T]: cached row of each; -1: not kept
    groups: tuple[PagedRows, ...]  # the attending rows, a group for each call of the kernel
    block_size: int
    attending: Tensor | None = None  # int64 [A]: the rows that attend; None: all

    def attend(
        self,
        queries: Tensor,
        cached: Tensor,
        layout: KVLayout,
        scale: float,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Compute the attention of ``queries`` ``[A, heads, key_dim]``; see ``paged_attention``.

        Returns:
            ``[A, heads * value_dim]``.
        """
        out = queries.new_empty(*queries.shape[:2], layout.value_dim)
        for rows in self.groups:
            paged_attention(
                queries, cached, rows, layout, self.block_size, scale, window, out, sinks
            )
        return out.flatten(1)


@dataclass(frozen=True)
class StepPlan:
    """The plans of a step. In the last layer only rows whose logits are wanted need attend, since nothing
    else of its output is read; all rows write keys and values for later steps."""

    layer: AttentionPlan  # of every layer but the last
    last: AttentionPlan  # one row attends at least: others rely on every layer being called


def plan_attention(batch: StepBatch, block_size: int, device: torch.device) -> StepPlan:
    """Plan ``batch`` over a cache with blocks of ``block_size`` tokens."""
    counts, wanted = batch.sequence_rows, batch.wanted
    assert len(counts) == len(wanted) == len(batch.block_tables)
    ends = list(accumulate(counts))
    # numpy: a step of one row is planned in less time than torch takes for three operations.
    positions = np.array(batch.positions)
    assert ends[-1] == len(positions)
    lengths = (positions[np.array(ends) - 1] + 1).tolist()
    tables = _padded(batch.block_tables, [-(-length // block_size) for length in lengths])

    sequences = np.arange(len(counts))
    if ends[-1] > len(counts):
        sequences = sequences.repeat(counts)
    block, offset = np.divmod(positions, block_size)
    write_offsets = torch.from_numpy(
        tables[sequences, block].astype(np.int64) * block_size + offset
    )

    layer = AttentionPlan(
        write_offsets.to(device), _groups(counts, lengths, tables, device), block_size
    )
    if wanted == counts:
        return StepPlan(layer, layer)
    assert all(0 <= few <= count for few, count in zip(wanted, counts, strict=True))
    if not any(wanted):
        wanted = [1, *wanted[1:]]
    attending = batch.attending
    last = replace(
        layer,
        groups=_groups(wanted, lengths, tables, device),
        attending=torch.tensor(attending, dtype=torch.int64).to(device),
    )
    return StepPlan(layer, last)


def _groups(
    counts: Sequence[int], lengths: Sequence[int], tables: NDArray[np.int32], device: torch.device
) -> tuple[PagedRows, ...]:
    """Group the last ``counts`` tokens of each sequence, which are the rows of one tensor."""
    facts = np.array([[0, *accumulate(counts)][:-1], counts, lengths], dtype=np.int32)
    groups = [[i for i, count in enumerate(counts) if count]]
    # Single rows have a launch of their own there.
    if device.type == "cuda":
        singles = [i for i, count in enumerate(counts) if count == 1]
        groups = [singles, [i for i, count in enumerate(counts) if count > 1]]
    return tuple(
        _rows(facts, tables, None if len(group) == len(counts) else group, device)
        for group in groups
        if group
    )


def _rows(
    facts: NDArray[np.int32],
    tables: NDArray[np.int32],
    mine: Sequence[int] | None,
    device: torch.device,
) -> PagedRows:
    if mine is not None:
        facts, tables = np.ascontiguousarray(facts[:, mine]), tables[mine]
    _, max_rows, max_length = facts.max(axis=1).tolist()
    # One copy for the three.
    first_rows, num_rows, lengths = torch.from_numpy(facts).to(device)
    block_tables = torch.from_numpy(tables).to(device)
    return PagedRows(first_rows, num_rows, lengths, block_tables, max_rows, max_length)


def _padded(block_tables: Sequence[Sequence[int]], num_blocks: Sequence[int]) -> NDArray[np.int32]:
    """Return the blocks in use, then zeros, ``[B, M]``."""
    tables = np.zeros((len(num_blocks), max(num_blocks)), dtype=np.int32)
    for row, table, used in zip(tables, block_tables, num_blocks, strict=True):
        # A single block would fill the row.
        assert len(table) >= used
        row[:used] = table[:used]
    return tables
