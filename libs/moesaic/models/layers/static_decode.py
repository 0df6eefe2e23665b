"""Decode steps of fixed shapes: what differs from step to step is read from one tensor.

Rows that fill a step up repeat its first row, so that they choose the same experts and read the same
cache; their keys and values are not kept.
"""

from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass(frozen=True)
class DecodeShapes:
    """The shapes of decode steps: 1, 2, 4, ... rows, of up to ``max_length`` tokens each."""

    max_rows: int
    max_length: int

    @property
    def sizes(self) -> list[int]:
        """Numbers of rows, up to the first that holds ``max_rows``."""
        return [1, *takewhile(lambda size: size < 2 * self.max_rows, (2**i for i in range(1, 32)))]

    def takes(self, batch: StepBatch) -> bool:
        """Return true if ``batch`` is a decode step of such a shape that wants the logits of all rows.

        The step must be exact: thresholds below 1 differ from step to step.
        """
        return (
            batch.promised is None
            and len(batch.sequence_rows) <= self.sizes[-1]
            and all(rows == 1 for rows in batch.sequence_rows)
            and batch.wanted == batch.sequence_rows
            and max(batch.positions) < self.max_length
        )

    @staticmethod
    def size_of(batch: StepBatch) -> int:
        """Return the least number of rows that holds ``batch``."""
        return 1 << (len(batch.sequence_rows) - 1).bit_length()


class StaticDecode:
    """A decode step of a fixed shape; it reads all that differs from step to step from ``inputs``."""

    def __init__(self, decoder: Decoder, cache: KVCache, num_rows: int, max_length: int) -> None:
        """Set the tensors aside; a row may have up to ``max_length`` tokens."""
        self._decoder, self._cache, self._max_length = decoder, cache, max_length
        max_blocks = -(-max_length // cache.block_size)
        self._host = torch.zeros(num_rows, _FACTS + max_blocks, dtype=torch.int64)
        # Nothing is kept until there are real rows.
        self._host[:, 2] = -1
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

    def planned(self) -> tuple[Tensor, Tensor, AttentionPlan]:
        """Return token ids and positions, int64 ``[num_rows]`` each, and the plan of attention."""
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
        plan = AttentionPlan(write_offsets, (rows,), self._cache.block_size)
        return token_ids, positions, plan

    async def compute(self, moe: MoELayer) -> Tensor:
        """Compute the logits ``[num_rows, vocab]``."""
        token_ids, positions, plan = self.planned()
        hidden = await self._decoder.compute(
            token_ids, positions, StepPlan(plan, plan), self._cache, moe
        )
        return self._decoder.logits(hidden)


def compile_kernels(device: torch.device, compute: Callable[[], object]) -> None:
    """Compute a step as often as it takes to compile its kernels and to take their addresses."""
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has no types here
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP_STEPS):
            compute()
    torch.cuda.current_stream().wait_stream(side)
