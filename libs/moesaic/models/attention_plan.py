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
    mask: Tensor  # [B, 1, 1, L], added to scores: minus infinity where a row must not look


@dataclass(frozen=True)
class RowRun:
    """Rows of one sequence that are attended together."""

    start: int
    stop: int
    slots: Tensor  # int64 [L]
    mask: Tensor | None  # [n, L], as above; None: the rows are the whole sequence, plainly causal
    padding: tuple[int, int] = (0, 0)  # rows of nothing before and after, counted in n


@dataclass(frozen=True)
class AttentionPlan:
    """What the rows of a step write and read."""

    write_slots: Tensor  # int64 [T]
    single: SingleRows | None
    runs: tuple[RowRun, ...]
    paged: PagedPlan | None = None  # on a GPU, in place of the two above


@dataclass(frozen=True)
class AttentionPlanner:
    """Plans steps of one model.

    A row sees its own and the ``window - 1`` positions before it, or all of them.

    The last bits of a product depend on its shape. With ``deterministic`` every row is attended in
    a shape that depends on its position alone: the rows of its block, those of other steps left
    empty, over all positions up to the block's end.
    """

    window: int | None
    dtype: torch.dtype  # of queries, and of masks
    device: torch.device
    deterministic: bool = False

    def plan(self, batch: StepBatch, block_size: int) -> AttentionPlan:
        """The plan of ``batch`` over a cache with blocks of ``block_size`` tokens."""
        assert len(batch.sequence_rows) == len(batch.block_tables)
        if self.device.type == "cuda":
            write_slots, paged = plan_paged(batch, block_size, self.window, self.device)
            return AttentionPlan(write_slots, None, (), paged)
        bounds = torch.tensor([0, *batch.sequence_rows]).cumsum(0).tolist()
        assert bounds[-1] == len(batch.positions)
        lengths: list[int] = (batch.positions[torch.tensor(bounds[1:]) - 1] + 1).tolist()

        runs: list[RowRun] = []
        singles: list[int] = []
        write_slots = torch.empty(bounds[-1], dtype=torch.int64, device=self.device)
        for sequence, (start, stop) in enumerate(pairwise(bounds)):
            if stop - start == 1 and not self.deterministic:
                singles.append(sequence)
                continue
            slots = self._slots([batch.block_tables[sequence]], block_size)[0, : lengths[sequence]]
            assert len(slots) == lengths[sequence]
            write_slots[start:stop] = slots[start - stop :]
            if self.deterministic:
                runs += self._tiles(start, stop, slots, block_size)
            else:
                runs.append(self._run(start, stop, slots))
        single = None
        if singles:
            tables = [batch.block_tables[i] for i in singles]
            rows = torch.tensor([bounds[i] for i in singles], device=self.device)
            single, written = self._single(rows, tables, [lengths[i] for i in singles], block_size)
            write_slots[rows] = written
        return AttentionPlan(write_slots, single, tuple(runs))

    def _run(self, start: int, stop: int, slots: Tensor) -> RowRun:
        rows, length = stop - start, len(slots)
        if rows == length and (self.window is None or self.window >= length):
            return RowRun(start, stop, slots, None)
        return RowRun(start, stop, slots, self._causal(length - rows, length))

    def _tiles(self, start: int, stop: int, slots: Tensor, block_size: int) -> Iterator[RowRun]:
        length = len(slots)
        first = length - (stop - start)  # position of the row ``start``
        for block in range(first // block_size, -(-length // block_size)):
            bounds = (block * block_size, (block + 1) * block_size)
            begin, end = max(first, bounds[0]), min(length, bounds[1])
            # What is not there yet reads the sequence's own first token, and is masked.
            missing = slots[:1].expand(max(0, bounds[1] - length))
            yield RowRun(
                start + begin - first,
                start + end - first,
                torch.cat((slots[: bounds[1]], missing)),
                self._causal(*bounds),
                padding=(begin - bounds[0], bounds[1] - end),
            )

    def _single(
        self, rows: Tensor, block_tables: list[list[int]], lengths: list[int], block_size: int
    ) -> tuple[SingleRows, Tensor]:
        longest = max(lengths)
        num_blocks = -(-longest // block_size)
        padded = [(table + table[:1] * num_blocks)[:num_blocks] for table in block_tables]
        slots = self._slots(padded, block_size)[:, :longest]
        length = torch.tensor(lengths, device=self.device).unsqueeze(1)
        column = torch.arange(longest, device=self.device)
        seen = column < length  # [B, L]
        written = slots.gather(1, length - 1).squeeze(1)
        # Padding reads the sequence's own first token: masked, yet a NaN in another sequence's rows
        # would still spread.
        slots = torch.where(seen, slots, slots[:, :1])
        if self.window is not None:
            seen = seen & (column >= length - self.window)
        return SingleRows(rows, slots, self._mask(seen)[:, None, None, :]), written

    def _slots(self, block_tables: list[list[int]], block_size: int) -> Tensor:
        """The cache rows of the blocks, in order: ``[B, blocks * block_size]``."""
        first = torch.tensor(block_tables, device=self.device) * block_size
        return (first.unsqueeze(-1) + torch.arange(block_size, device=self.device)).flatten(1)

    def _causal(self, first: int, length: int) -> Tensor:
        """The mask of the positions from ``first`` up to ``length``."""
        position = torch.arange(first, length, device=self.device).unsqueeze(1)
        column = torch.arange(length, device=self.device)
        seen = column <= position
        if self.window is not None:
            seen &= column > position - self.window
        return self._mask(seen)

    def _mask(self, seen: Tensor) -> Tensor:
        """What is added to scores: attention would make it of truth values in every layer."""
        mask = torch.zeros(seen.shape, dtype=self.dtype, device=self.device)
        return mask.masked_fill_(~seen, -torch.inf)
