"""Decode steps as CUDA graphs: one launch in place of hundreds, if the experts are in this process.

Steps are captured once per padded number of rows. Rows that fill a step up repeat its first row, so
that they choose the same experts and read the same cache; their keys and values are not kept.
"""

from collections.abc import Awaitable
from itertools import takewhile

import torch
from torch import Tensor

from moesaic.kernels.paged_rows import PagedRows
from moesaic.models.layers.attention_plan import AttentionPlan, StepPlan
from moesaic.models.layers.decoder import Decoder, MoELayer
from moesaic.models.layers.kv_cache import KVCache
from moesaic.models.layers.step_batch import StepBatch

WARM_UP_STEPS = 2
_FACTS = 3  # of a row, before its block table: token, position, where it is cached


class StaticDecode:
    """A decode step of a fixed shape; it reads all that differs from step to step from ``inputs``."""

    def __init__(self, decoder: Decoder, cache: KVCache, num_rows: int, max_length: int) -> None:
        """Set the tensors aside; a row may have up to ``max_length`` tokens."""
        self._decoder, self._cache, self._max_length = decoder, cache, max_length
        max_blocks = -(-max_length // cache.block_size)
        self._host = torch.zeros(num_rows, _FACTS + max_blocks, dtype=torch.int64)
        self._host[:, 2] = -1  # nothing is kept until there are real rows
        self.inputs = self._host.to(decoder.device)  # int64 [num_rows, 3 + blocks]
        self._each = torch.arange(num_rows, device=decoder.device)
        self._one_each = torch.ones(num_rows, dtype=torch.int32, device=decoder.device)

    def fill(self, batch: StepBatch) -> None:
        """Take the rows of ``batch``, which ``takes`` has accepted."""
        host, count, size = self._host, len(batch.token_ids), self._cache.block_size
        host.zero_()
        host[:count, 0], host[:count, 1] = batch.on(host.device)
        for row, block_table in enumerate(batch.block_tables):
            used = block_table[: host.shape[1] - _FACTS]
            host[row, _FACTS : _FACTS + len(used)] = torch.tensor(used)
        block = host.gather(1, _FACTS + host[:, 1:2] // size).squeeze(1)
        host[:, 2] = block * size + host[:, 1] % size
        host[count:] = host[0]
        host[count:, 2] = -1
        self.inputs.copy_(host)

    async def compute(self, moe: MoELayer) -> Tensor:
        """Compute the logits ``[num_rows, vocab]``."""
        token_ids, positions, write_offsets = (
            self.inputs[:, i].contiguous() for i in range(_FACTS)
        )
        rows = PagedRows(
            first_rows=self._each.int(),
            num_rows=self._one_each,
            lengths=(positions + 1).int(),
            block_tables=self.inputs[:, _FACTS:].int(),
            max_rows=1,
            max_length=self._max_length,
        )
        plan = AttentionPlan(write_offsets, (rows,), self._cache.block_size, self._decoder.window)
        hidden = await self._decoder.compute(
            token_ids, positions, StepPlan(plan, plan), self._cache, moe
        )
        return self._decoder.logits(hidden)


class DecodeGraphs:
    """The captured steps of one decoder over one cache."""

    def __init__(
        self, decoder: Decoder, cache: KVCache, moe: MoELayer, max_rows: int, max_length: int
    ) -> None:
        """Capture steps of 1, 2, 4, ... rows, up to the first that holds ``max_rows``.

        ``moe`` computes on the same device without awaiting anything, and keeps the weights that it
        holds now. The cost of a row grows with ``max_length``, even if the row is short.
        """
        self._max_length = max_length
        sizes = [1, *takewhile(lambda size: size < 2 * max_rows, (2**i for i in range(1, 32)))]
        self._steps: dict[int, tuple[StaticDecode, torch.cuda.CUDAGraph, Tensor]] = {}
        pool = None
        for size in reversed(sizes):  # the largest first: the others fit into its memory
            step = StaticDecode(decoder, cache, size, max_length)
            side = torch.cuda.Stream(decoder.device)  # type: ignore[no-untyped-call]  # torch has no types here
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(WARM_UP_STEPS):  # compiles kernels, takes their addresses
                    _at_once(step.compute(moe))
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                logits = _at_once(step.compute(moe))
            pool = pool or graph.pool()
            self._steps[size] = (step, graph, logits)

    @property
    def layers_done(self) -> int:
        """Always 0: a step is one launch."""
        return 0

    def takes(self, batch: StepBatch) -> bool:
        """Return true if ``batch`` is a captured decode step that wants the logits of all rows."""
        count = len(batch.sequence_rows)
        return (
            count <= max(self._steps)
            and all(rows == 1 for rows in batch.sequence_rows)
            and batch.wanted == batch.sequence_rows
            and max(batch.positions) < self._max_length
        )

    def forward(self, batch: StepBatch) -> Tensor:
        """Compute as ``Decoder.forward`` a batch that ``takes`` accepts."""
        count = len(batch.sequence_rows)
        step, graph, logits = self._steps[1 << (count - 1).bit_length()]
        step.fill(batch)
        graph.replay()
        return logits[:count].clone()  # the next replay writes over them


def _at_once(step: Awaitable[Tensor]) -> Tensor:
    try:
        next(step.__await__())
    except StopIteration as done:
        logits: Tensor = done.value
        return logits
    raise RuntimeError("a step that waits for other processes cannot be captured")
