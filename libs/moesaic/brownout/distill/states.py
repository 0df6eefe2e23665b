"""The hidden states that a model's experts see, layer by layer, with as much in memory as one layer needs.

All rows pass a layer before any passes the next (as in sweeps), and wait in a file meanwhile.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moesaic.experts.slots import SlotTable
from moesaic.models.layers.attention_plan import plan_attention
from moesaic.models.layers.decoder import Decoder
from moesaic.models.layers.gate import Gate
from moesaic.models.layers.kv_cache import KVCache
from moesaic.models.layers.step_batch import StepBatch

BLOCK_SIZE, MOST_ROWS = 16, 2048  # of one pass


@dataclass(frozen=True)
class RoutedRows:
    """The rows of one layer, and what its gate made of them.

    Attributes:
        inputs: float32 ``[N, H]``, normed; a file.
        ids: int32 ``[N, k]``.
        weights: float32 ``[N, k]``.
    """

    inputs: NDArray[np.float32]
    ids: NDArray[np.int32]
    weights: NDArray[np.float32]


class LayerByLayer:
    """Sequences on their way through a decoder."""

    def __init__(self, decoder: Decoder, sequences: Sequence[Sequence[int]], room: Path) -> None:
        """Look the tokens up; hidden states lie in two files in the directory ``room``."""
        self._decoder, self._sequences = decoder, sequences
        self._starts = [0, *accumulate(map(len, sequences))]
        shape = (self._starts[-1], decoder.config.hidden_size)
        self._hidden, self._inputs = (
            np.memmap(room / name, dtype=np.float32, mode="w+", shape=shape)
            for name in ("hidden.f32", "inputs.f32")
        )
        for sequence, (start, end) in zip(sequences, pairwise(self._starts), strict=True):
            embedded = decoder.embed(torch.tensor(sequence, device=decoder.device))
            self._hidden[start:end] = embedded.float().cpu().numpy()

    async def pass_dense(self, layer: int) -> None:
        """Take all rows through a layer without experts."""
        await self._pass(layer, _no_experts)

    async def pass_sparse(self, layer: int, gate: Gate, table: SlotTable) -> RoutedRows:
        """Take all rows through a layer whose experts are all in ``table``, each in its own slot."""
        routing: list[tuple[Tensor, Tensor]] = []
        done = 0

        async def experts(_: int, normed: Tensor) -> Tensor:
            nonlocal done
            self._inputs[done : done + len(normed)] = normed.float().cpu().numpy()
            done += len(normed)
            weights, ids = gate(normed)
            routing.append((ids.cpu(), weights.cpu()))
            return table.compute(layer, normed, weights, ids, mine=None).to(normed.dtype)

        await self._pass(layer, experts)
        ids, weights = (torch.cat(part).numpy() for part in zip(*routing, strict=True))
        return RoutedRows(self._inputs, ids, weights)

    async def _pass(self, layer: int, moe: Callable[[int, Tensor], "object"]) -> None:
        decoder = self._decoder
        for first, behind in self._batches():
            batch, cache = self._batch(first, behind)
            plan = plan_attention(batch, BLOCK_SIZE, decoder.window, decoder.device).layer
            rows = slice(self._starts[first], self._starts[behind])
            hidden = torch.from_numpy(self._hidden[rows]).to(decoder.device, decoder.dtype)
            _, positions = batch.on(decoder.device)
            hidden = await decoder.compute_layer(layer, hidden, positions, plan, cache, moe)  # type: ignore[arg-type]
            self._hidden[rows] = hidden.float().cpu().numpy()

    def _batches(self) -> Iterator[tuple[int, int]]:
        """Cut the sequences into batches of about ``MOST_ROWS`` rows."""
        first = 0
        for index in range(1, len(self._sequences) + 1):
            at_end = index == len(self._sequences)
            if at_end or self._starts[index + 1] - self._starts[first] > MOST_ROWS:
                yield first, index
                first = index

    def _batch(self, first: int, behind: int) -> tuple[StepBatch, KVCache]:
        own = self._sequences[first:behind]
        needed = [-(-len(sequence) // BLOCK_SIZE) for sequence in own]
        tables = [list(range(start, end)) for start, end in pairwise([0, *accumulate(needed)])]
        batch = StepBatch(
            token_ids=[token for sequence in own for token in sequence],
            positions=[at for sequence in own for at in range(len(sequence))],
            sequence_rows=[len(sequence) for sequence in own],
            block_tables=tables,
            wanted=[len(sequence) for sequence in own],
        )
        config, decoder = self._decoder.config, self._decoder
        cache = KVCache(
            config, sum(needed), BLOCK_SIZE, decoder.dtype, decoder.device, one_for_all=True
        )
        return batch, cache


async def _no_experts(layer: int, normed: Tensor) -> Tensor:
    raise AssertionError(f"layer {layer} has no experts")
