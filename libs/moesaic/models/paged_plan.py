"""The plan of a step on a GPU: no masks and no gathered rows, only what the kernels ask for."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from moesaic.kernels.paged_attention import KVLayout, PagedRows, paged_attention
from moesaic.models.step_batch import StepBatch


@dataclass(frozen=True)
class PagedPlan:
    """Which rows attend to what, in the launches that they are best computed in."""

    groups: tuple[PagedRows, ...]  # sequences with one row, then those with several
    block_size: int
    window: int | None

    def attend(self, queries: Tensor, cached: Tensor, layout: KVLayout, scale: float) -> Tensor:
        """What the ``queries`` ``[T, heads, key_dim]`` attend to: ``[T, heads * value_dim]``."""
        out = queries.new_empty(*queries.shape[:2], layout.value_dim)
        for rows in self.groups:
            paged_attention(queries, cached, rows, layout, self.block_size, scale, self.window, out)
        return out.flatten(1)


def plan_paged(
    batch: StepBatch, block_size: int, window: int | None, device: torch.device
) -> tuple[Tensor, PagedPlan]:
    """Where the rows of ``batch`` are written (int64 ``[T]``), and the plan of what they read."""
    counts = torch.tensor(batch.sequence_rows)
    bounds = [0, *counts.cumsum(0).tolist()]
    lengths = batch.positions[torch.tensor(bounds[1:]) - 1] + 1
    num_blocks = -(-lengths // block_size)
    tables = torch.zeros(len(counts), int(num_blocks.max()), dtype=torch.int64)
    for sequence, block_table in enumerate(batch.block_tables):
        used = block_table[: num_blocks[sequence]]
        tables[sequence, : len(used)] = torch.tensor(used)
    sequence_of_row = torch.arange(len(counts)).repeat_interleave(counts)
    block = tables[sequence_of_row, batch.positions // block_size]
    write_slots = block * block_size + batch.positions % block_size

    first_rows = torch.tensor([start for start, _ in pairwise(bounds)])
    groups = []
    for mine in (counts == 1, counts > 1):
        if not mine.any():
            continue
        facts = torch.stack((first_rows[mine], counts[mine], lengths[mine]))
        facts = facts.to(device, torch.int32)  # one copy for the three
        max_length = int(lengths[mine].max())
        groups.append(
            PagedRows(
                first_rows=facts[0],
                num_rows=facts[1],
                lengths=facts[2],
                block_tables=tables[mine].to(device, torch.int32),
                max_rows=int(counts[mine].max()),
                max_length=max_length,
            )
        )
    return write_slots.to(device), PagedPlan(tuple(groups), block_size, window)
