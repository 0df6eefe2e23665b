"""Decode steps of fixed shapes: what differs from step to step is read from tensors that stay.

Rows that fill a step up repeat its first row, so that they choose the same experts and read the same
cache; their keys and values are not kept.
"""

from bisect import bisect_left
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moesaic.kernels.paged_rows import PagedRows
from moesaic.models.configuration.captured import decode_sizes
from moesaic.models.layers.attention_plan import AttentionPlan, StepPlan
from moesaic.models.layers.decoder import Decoder, MoELayer
from moesaic.models.layers.kv_cache import KVCache
from moesaic.models.layers.other_ranks import StepsOfRanks
from moesaic.models.layers.step_batch import StepBatch

WARM_UP_STEPS = 2


def longest_context(decoder: Decoder, cache: KVCache) -> int:
    """Return the largest number of tokens of a sequence: those of the model, or all that ``cache`` holds."""
    return min(decoder.config.max_positions, cache.num_blocks * cache.block_size)


@dataclass(frozen=True)
class DecodeShapes:
    """The shapes of decode steps: ``decode_sizes`` rows, of up to ``max_length`` tokens each."""

    max_rows: int
    max_length: int

    @cached_property
    def sizes(self) -> list[int]:
        """Numbers of rows, up to the first that holds ``max_rows``."""
        return decode_sizes(self.max_rows)

    def takes(self, batch: StepBatch) -> bool:
        """Return true if ``batch`` is a decode step of such a shape that wants the logits of all rows."""
        return (
            all(rows == 1 for rows in batch.sequence_rows)
            and batch.wanted == batch.sequence_rows
            and self.size_for(len(batch.sequence_rows), max(batch.positions)) is not None
        )

    def size_of(self, batch: StepBatch) -> int:
        """Return the size of a step that ``takes`` accepts."""
        return self.sizes[bisect_left(self.sizes, len(batch.sequence_rows))]

    def size_for(self, num_rows: int, last_position: int) -> int | None:
        """Return the least size that holds so many rows; None: there are too many, or one is too long."""
        if num_rows > self.sizes[-1] or last_position >= self.max_length:
            return None
        return self.sizes[bisect_left(self.sizes, num_rows)]


class StepTensors:
    """The tensors that decode steps of all sizes over one cache read and leave their results in.

    Their graphs share one pool of memory.

    Attributes:
        others: the other ranks' parts of these steps; None: there are none.
    """

    def __init__(self, decoder: Decoder, cache: KVCache, shapes: DecodeShapes) -> None:
        """Reserve them, for steps of these shapes."""
        self.shapes, self.block_size = shapes, cache.block_size
        num_rows, device = shapes.sizes[-1], decoder.device
        max_blocks = -(-shapes.max_length // cache.block_size)
        # Token, position and cached row of each row. Nothing is kept until there are real rows.
        self.facts = torch.zeros(3, num_rows, dtype=torch.int64, device=device)
        self.facts[2] = -1
        self.tables = torch.zeros(num_rows, max_blocks, dtype=torch.int32, device=device)
        self.each = torch.arange(num_rows, dtype=torch.int32, device=device)
        self.one_each = torch.ones(num_rows, dtype=torch.int32, device=device)
        vocab = decoder.config.vocab_size
        self.logits = torch.zeros(num_rows, vocab, device=device)  # float32
        self._pool: Any = None
        self._graphs = WeakSet[torch.cuda.CUDAGraph]()
        self.others: StepsOfRanks | None = None

    def divide(self, decoder: Decoder, cache: KVCache, *, whole: bool) -> None:
        """Have the other ranks of ``decoder``, if there are any, compute their parts; see ``OtherRanks.prepare``."""
        if decoder.others is not None:
            shapes = self.shapes
            self.others = decoder.others.prepare(
                cache, shapes.max_rows, shapes.max_length, self.release, whole=whole
            )

    def capturing(self, size: int) -> AbstractContextManager[None]:
        """See ``StepsOfRanks.capturing``."""
        return self.others.capturing(size) if self.others else nullcontext()

    def awaited(self) -> AbstractContextManager[None]:
        """See ``StepsOfRanks.awaited``."""
        return self.others.awaited() if self.others else nullcontext()

    def captured(self, compute: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """Make a graph of what ``compute`` launches."""
        graph = torch.cuda.CUDAGraph()
        # Other threads may load united experts or link workers meanwhile, and take memory of the device.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            compute()
        self._pool = self._pool or graph.pool()
        self._graphs.add(graph)
        return graph

    def release(self) -> None:
        """Free all graphs, for good. NCCL ends a group only when no graph has its operations."""
        for graph in self._graphs:
            graph.reset()

    def fill(self, batch: StepBatch, size: int) -> None:
        """Take the rows of ``batch``, which ``DecodeShapes.takes`` has accepted, as the first of ``size``."""
        count = len(batch.token_ids)
        positions = np.array(batch.positions)
        used = int(positions.max()) // self.block_size + 1
        tables = np.zeros((size, used), np.int32)
        for row, table in zip(tables, batch.block_tables, strict=False):
            mine = table[:used]
            row[: len(mine)] = mine
        tables[count:] = tables[0]
        facts = np.empty((3, size), np.int64)
        facts[0, :count], facts[1, :count] = batch.token_ids, positions
        block, offset = np.divmod(positions, self.block_size)
        facts[2, :count] = tables[np.arange(count), block].astype(np.int64) * self.block_size
        facts[2, :count] += offset
        facts[:, count:] = facts[:, :1]
        facts[2, count:] = -1
        if self.others:
            self.others.begin(facts, tables)
        with self.awaited():
            self.put(facts, tables)

    def put(self, facts: NDArray[np.int64], tables: NDArray[np.int32]) -> None:
        """Take what ``fill`` has made of a batch.

        Args:
            facts: token, position and cached row of each row, ``[3, size]``.
            tables: block tables, ``[size, blocks]``.
        """
        size, used = tables.shape
        self.facts[:, :size].copy_(torch.from_numpy(facts))
        # What is left of earlier steps behind these blocks is not read.
        self.tables[:size, :used].copy_(torch.from_numpy(tables))


class StaticDecode:
    """A decode step of a fixed shape; it reads all that differs from step to step from ``StepTensors``."""

    def __init__(
        self, decoder: Decoder, cache: KVCache, tensors: StepTensors, num_rows: int
    ) -> None:
        """Compute the first ``num_rows`` of ``tensors``."""
        self._decoder, self._cache, self._tensors = decoder, cache, tensors
        self._num_rows = num_rows

    def planned(self) -> tuple[Tensor, Tensor, AttentionPlan]:
        """Return token ids and positions, int64 ``[num_rows]`` each, and the plan of attention."""
        tensors, mine = self._tensors, slice(self._num_rows)
        token_ids, positions, write_offsets = (fact[mine] for fact in tensors.facts)
        rows = PagedRows(
            first_rows=tensors.each[mine],
            num_rows=tensors.one_each[mine],
            lengths=(positions + 1).int(),
            block_tables=tensors.tables[mine],
            max_rows=1,
            max_length=tensors.shapes.max_length,
        )
        plan = AttentionPlan(write_offsets, (rows,), self._cache.block_size)
        return token_ids, positions, plan

    async def compute(self, moe: MoELayer) -> None:
        """Leave the logits in ``StepTensors.logits``."""
        token_ids, positions, plan = self.planned()
        hidden = await self._decoder.compute(
            token_ids, positions, StepPlan(plan, plan), self._cache, moe
        )
        self._tensors.logits[: self._num_rows].copy_(self._decoder.logits(hidden))


def compile_kernels(device: torch.device, compute: Callable[[], object]) -> None:
    """Compute a step as often as it takes to compile its kernels and to take their addresses."""
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has no types here
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP_STEPS):
            compute()
    torch.cuda.current_stream().wait_stream(side)
