"""Decode steps as CUDA graphs: one launch in place of hundreds, if the experts are in this process.

Steps are captured once per padded number of rows: exact ones at the start, and degraded ones when the
first of a size comes, since their united experts may change.
"""

from collections.abc import Awaitable, Callable
from copy import copy
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from moesaic.kernels.promised import PromisedRows, StaticPromises
from moesaic.models.layers.decoder import Decoder, MoELayer
from moesaic.models.layers.kv_cache import KVCache
from moesaic.models.layers.static_decode import (
    DecodeShapes,
    StaticDecode,
    StepTensors,
    compile_kernels,
)
from moesaic.models.layers.step_batch import StepBatch
from moesaic.telemetry.shortage import ran_out_of_memory

_Result = TypeVar("_Result")

DegradedLayer = Callable[[int, Tensor, PromisedRows], Awaitable[Tensor]]
"""A ``MoELayer`` of rows with promises, which counts the degraded choices in these."""


class DecodeGraphs:
    """The captured steps of one decoder over one cache."""

    def __init__(
        self, decoder: Decoder, cache: KVCache, moe: MoELayer, max_rows: int, max_length: int
    ) -> None:
        """Capture exact steps of up to ``max_rows`` rows of ``max_length`` tokens.

        ``moe`` computes on the same device without awaiting anything, and keeps the weights that it
        holds now.
        """
        self._decoder, self._cache = decoder, cache
        self._shapes = DecodeShapes(max_rows, max_length)
        self._tensors = StepTensors(decoder, cache, self._shapes)
        self._tensors.divide(decoder, cache, whole=True)
        self._exact: dict[int, torch.cuda.CUDAGraph] = {}
        # The largest first: the others fit its memory.
        for size in reversed(self._shapes.sizes):
            with self._tensors.capturing(size):
                self._exact[size] = self._captured(partial(_at_once_by, self._step(size), moe))
        self._degrading: DegradedLayer | None = None
        self._degraded: dict[int, tuple[StaticPromises, torch.cuda.CUDAGraph]] = {}

    def degrading(self, moe: DegradedLayer) -> "DecodeGraphs":
        """Return the same steps, and besides them degraded ones, whose choices ``moe`` splits and computes.

        Of several ranks: the same steps alone. Degraded ones are captured while requests wait, and the
        other ranks would wait for a capture that fails for want of memory.
        """
        if self._tensors.others:
            return self
        other = copy(self)
        other._degrading, other._degraded = moe, {}
        return other

    @property
    def layers_done(self) -> int:
        """Always 0: a step is one launch."""
        return 0

    def takes(self, batch: StepBatch) -> bool:
        """See ``DecodeShapes.takes``; degraded steps need experts to degrade by."""
        if not self._shapes.takes(batch):
            return False
        promised = batch.promised
        return promised is None or (self._degrading is not None and StaticPromises.takes(promised))

    def forward(self, batch: StepBatch) -> Tensor:
        """Compute as ``Decoder.forward`` a batch that ``takes`` accepts."""
        size = self._shapes.size_of(batch)
        self._tensors.fill(batch, size)
        if batch.promised is None:
            with self._tensors.awaited():
                self._exact[size].replay()
        else:
            promises, graph = self._degraded.get(size) or self._capture_degraded(size)
            promises.fill(batch.promised)
            graph.replay()
            promises.settle_in(batch.promised)
        # The next replay writes over them.
        return self._tensors.logits[: len(batch.sequence_rows)].clone()

    def _step(self, size: int) -> StaticDecode:
        return StaticDecode(self._decoder, self._cache, self._tensors, size)

    def _capture_degraded(self, size: int) -> tuple[StaticPromises, torch.cuda.CUDAGraph]:
        degrading = self._degrading
        assert degrading is not None
        promises = StaticPromises(size, self._decoder.device, self._decoder.config.num_layers)
        step = self._step(size)

        def moe(layer: int, hidden_states: Tensor) -> Awaitable[Tensor]:
            return degrading(layer, hidden_states, promises.enter(layer))

        def compute() -> None:
            promises.degraded.zero_()
            _at_once_by(step, moe)

        try:
            found = self._degraded[size] = promises, self._captured(compute)
        except Exception as error:
            if ran_out_of_memory(error):
                # Each later step would fail likewise: it goes kernel by kernel.
                self._degrading, self._degraded = None, {}
            raise
        return found

    def _captured(self, compute: Callable[[], None]) -> torch.cuda.CUDAGraph:
        compile_kernels(self._decoder.device, compute)
        return self._tensors.captured(compute)


def _at_once_by(step: StaticDecode, moe: MoELayer) -> None:
    at_once(step.compute(moe))


def at_once(step: Awaitable[_Result]) -> _Result:
    """Return what a step gives that waits for nobody; an event loop would keep Ctrl-C from the caller."""
    try:
        next(step.__await__())
    except StopIteration as done:
        result: _Result = done.value
        return result
    raise RuntimeError("the step waits for other processes")
