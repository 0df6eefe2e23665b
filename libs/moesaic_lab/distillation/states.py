"""The rows that a model's experts see, layer by layer, with as much in memory as one layer needs.

All rows pass a layer before any passes the next one, and wait in files meanwhile.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moesaic.experts.slots import load_table
from moesaic.models.layers.attention_plan import plan_attention
from moesaic.models.layers.decode_graphs import at_once
from moesaic.models.layers.decoder import Decoder, MoELayer
from moesaic.models.layers.gate import Gate
from moesaic.models.layers.kv_cache import KVCache
from moesaic.models.layers.step_batch import StepBatch
from moesaic.models.weights.checkpoint import Checkpoint

BLOCK_SIZE = 16  # tokens of a KV block
MOST_ROWS = 2048  # of one pass, if no sequence is longer


@dataclass(frozen=True)
class RoutedRows:
    """The rows of one layer, and the choices of its gate.

    Attributes:
        inputs: float32 ``[N, H]``, normed as the experts get them; lies in a file, until the next layer is passed.
        ids: int32 ``[N, k]``.
        weights: float32 ``[N, k]``.
    """

    inputs: NDArray[np.float32]
    ids: NDArray[np.int32]
    weights: NDArray[np.float32]


class LayerByLayer:
    """Sequences on their way through a model, in float32 on the CPU."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        decoder: Decoder,
        sequences: Sequence[Sequence[int]],
        room: Path,
    ) -> None:
        """Look the tokens up.

        Args:
            checkpoint: of the model, for its experts.
            decoder: of the model, in float32.
            sequences: token ids, each from its first position.
            room: directory of two files, of ``4 * H`` bytes a token each.
        """
        self._checkpoint, self._decoder, self._sequences = checkpoint, decoder, sequences
        self._starts = [0, *accumulate(map(len, sequences))]
        shape = (self._starts[-1], decoder.config.hidden_size)
        self._hidden, self._inputs = (
            np.memmap(room / name, dtype=np.float32, mode="w+", shape=shape)
            for name in ("hidden.f32", "inputs.f32")
        )
        for sequence, (start, end) in zip(sequences, pairwise(self._starts), strict=True):
            self._hidden[start:end] = decoder.embed(torch.tensor(sequence)).numpy()

    def pass_layer(self, layer: int) -> RoutedRows | None:
        """Take all rows through the next layer; returns None for a dense one.

        Raises:
            CheckpointError: a tensor is missing, damaged or mis-shaped.
        """
        config, cpu = self._decoder.config, torch.device("cpu")
        if layer not in config.moe_layers:
            self._pass(layer, _no_experts)
            return None
        everything = {layer: range(config.moe.num_experts)}
        table = load_table(self._checkpoint, config, everything, torch.float32, cpu).table
        gate = Gate.load(self._checkpoint, config, layer, torch.float32, cpu)
        routing: list[tuple[Tensor, Tensor]] = []
        done = 0

        async def experts(_: int, normed: Tensor) -> Tensor:
            nonlocal done
            self._inputs[done : done + len(normed)] = normed.numpy()
            done += len(normed)
            weights, ids = gate(normed)
            routing.append((ids, weights))
            return table.compute(layer, normed, weights, ids, mine=None)

        self._pass(layer, experts)
        ids, weights = (torch.cat(part).numpy() for part in zip(*routing, strict=True))
        return RoutedRows(self._inputs, ids, weights)

    def _pass(self, layer: int, moe: MoELayer) -> None:
        decoder = self._decoder
        for first, behind in self._batches():
            batch, cache = self._batch(first, behind)
            plan = plan_attention(batch, BLOCK_SIZE, decoder.device).layer
            rows = slice(self._starts[first], self._starts[behind])
            _, positions = batch.on(decoder.device)
            hidden = torch.from_numpy(np.array(self._hidden[rows]))
            passed = decoder.compute_layer(layer, hidden, positions, plan, cache, moe)
            hidden = at_once(passed)
            self._hidden[rows] = hidden.numpy()

    def _batches(self) -> Iterator[tuple[int, int]]:
        """Cut the sequences into batches of about ``MOST_ROWS`` rows: the first of each, and the one behind."""
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
