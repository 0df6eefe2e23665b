"""Decode steps as CUDA graphs: one launch in place of hundreds, if the experts are in this process.

Steps are captured once per padded number of rows.
"""

from collections.abc import Awaitable
from functools import partial

import torch
from torch import Tensor

from moesaic.models.layers.decoder import Decoder, MoELayer
from moesaic.models.layers.kv_cache import KVCache
from moesaic.models.layers.static_decode import DecodeShapes, StaticDecode, compile_kernels
from moesaic.models.layers.step_batch import StepBatch


class DecodeGraphs:
    """The captured steps of one decoder over one cache."""

    def __init__(
        self, decoder: Decoder, cache: KVCache, moe: MoELayer, max_rows: int, max_length: int
    ) -> None:
        """Capture steps of 1, 2, 4, ... rows, up to the first that holds ``max_rows``.

        ``moe`` computes on the same device without awaiting anything, and keeps the weights that it
        holds now. The cost of a row grows with ``max_length``, even if the row is short.
        """
        self._shapes = DecodeShapes(max_rows, max_length)
        self._steps: dict[int, tuple[StaticDecode, torch.cuda.CUDAGraph, Tensor]] = {}
        pool = None
        # The largest first: the others fit its memory.
        for size in reversed(self._shapes.sizes):
            step = StaticDecode(decoder, cache, size, max_length)
            compute = partial(_at_once_by, step, moe)
            compile_kernels(decoder.device, compute)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                logits = compute()
            pool = pool or graph.pool()
            self._steps[size] = (step, graph, logits)

    @property
    def layers_done(self) -> int:
        """Always 0: a step is one launch."""
        return 0

    def takes(self, batch: StepBatch) -> bool:
        """See ``DecodeShapes.takes``."""
        return self._shapes.takes(batch)

    def forward(self, batch: StepBatch) -> Tensor:
        """Compute as ``Decoder.forward`` a batch that ``takes`` accepts."""
        step, graph, logits = self._steps[self._shapes.size_of(batch)]
        step.fill(batch)
        graph.replay()
        # The next replay writes over them.
        return logits[: len(batch.sequence_rows)].clone()


def _at_once_by(step: StaticDecode, moe: MoELayer) -> Tensor:
    return at_once(step.compute(moe))


def at_once(step: Awaitable[Tensor]) -> Tensor:
    """Return what a step gives that waits for nobody; an event loop would keep Ctrl-C from the caller."""
    try:
        next(step.__await__())
    except StopIteration as done:
        logits: Tensor = done.value
        return logits
    raise RuntimeError("the step waits for other processes")
