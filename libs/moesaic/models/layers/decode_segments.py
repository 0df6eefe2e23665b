"""Decode steps in segments, between which experts in other processes are asked.

A segment is all that this process computes between two exchanges: the addition of what came back, norm,
attention and norm, and dense layers if there are any. The shared expert is one of its own, for it is
computed while the others are. On a CUDA device each segment is a graph, launched at once; on a CPU it is
a function.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from moesaic.models.layers.decoder import Decoder, MoELayer, PassingRows
from moesaic.models.layers.kv_cache import KVCache
from moesaic.models.layers.static_decode import (
    DecodeShapes,
    StaticDecode,
    StepTensors,
    compile_kernels,
)
from moesaic.models.layers.step_batch import StepBatch


@dataclass(frozen=True)
class Segment:
    """Computing up to the experts of one layer, and while they are waited for."""

    layer: int
    attend: Callable[[], None]
    share: Callable[[], None] | None  # None: there is no shared expert


class SegmentTensors(StepTensors):
    """The tensors of segments of all sizes, with those that they exchange with the experts: ``[rows, H]`` each.

    Attributes:
        normed: rows that the experts of the layer are asked.
        returned: their answer.
    """

    def __init__(self, decoder: Decoder, cache: KVCache, shapes: DecodeShapes) -> None:
        """See ``StepTensors``."""
        super().__init__(decoder, cache, shapes)
        shape = shapes.sizes[-1], decoder.config.hidden_size
        self.normed, self.returned = (
            torch.zeros(*shape, dtype=decoder.dtype, device=decoder.device) for _ in range(2)
        )


class SegmentedDecode:
    """A decode step of a fixed shape. Each segment finds what it reads where others have left it."""

    def __init__(
        self, decoder: Decoder, cache: KVCache, tensors: SegmentTensors, num_rows: int
    ) -> None:
        """Compute the first ``num_rows`` of ``tensors``."""
        self._decoder, self._cache, self._tensors = decoder, cache, tensors
        self._step = StaticDecode(decoder, cache, tensors, num_rows)
        self._normed, self._returned = tensors.normed[:num_rows], tensors.returned[:num_rows]
        self._logits = tensors.logits[:num_rows]
        self._rows: PassingRows | None = None
        self._hidden = self._returned  # the residual stream behind the last attention
        self._shared: Tensor | None = None  # output of the last shared expert
        layers = decoder.config.moe_layers
        begins = [0, *(layer + 1 for layer in layers)]
        self._segments = [
            Segment(
                layer,
                partial(self._attend, first, layer),
                partial(self._share, layer) if decoder.shared(layer) else None,
            )
            for first, layer in zip(begins, layers, strict=False)
        ]
        self._finish: Callable[[], None] = partial(self._end, begins[-1])

    async def forward(self, batch: StepBatch, moe: MoELayer) -> Tensor:
        """Compute as ``Decoder.forward`` a batch of this shape or less; experts see its own rows alone."""
        self._tensors.fill(batch, len(self._returned))
        count, computing = len(batch.sequence_rows), self._computing()
        try:
            for segment in self._segments:
                next(computing)
                routed = moe(segment.layer, self._normed[:count])
                if segment.share is not None:
                    # While the experts are computed.
                    next(computing)
                self._returned[:count].copy_(await routed)
            next(computing)
        except BaseException:
            # The other ranks compute the step to its end. The rows that it keeps are written again when it is repeated.
            if self._tensors.others:
                deque(computing, maxlen=0)
            raise
        # The next step writes over them.
        return self._logits[:count].clone()

    def capture(self) -> None:
        """Make each segment a graph."""

        def captured(compute: Callable[[], None]) -> Callable[[], None]:
            return self._tensors.captured(compute).replay

        with self._tensors.capturing(len(self._returned)):
            compile_kernels(self._decoder.device, self._run)
            self._segments = [
                Segment(each.layer, captured(each.attend), each.share and captured(each.share))
                for each in self._segments
            ]
            self._finish = captured(self._finish)

    def _run(self) -> None:
        """Compute all segments, with any results of the experts."""
        deque(self._computing(), maxlen=0)

    def _computing(self) -> Iterator[None]:
        """Compute a segment, or a shared expert, each time that the next one is asked for."""
        parts = [part for each in self._segments for part in (each.attend, each.share) if part]
        for part in (*parts, self._finish):
            with self._tensors.awaited():
                part()
            yield

    def _begin(self, first: int) -> tuple[Tensor, Tensor | None]:
        """Return the residual stream before layer ``first``, and what is to be added to it."""
        if first:
            returned, shared = self._returned, self._shared
            return self._hidden, returned if shared is None else shared + returned
        token_ids, positions, plan = self._step.planned()
        self._rows = self._decoder.rows(positions, plan, self._cache)
        return self._decoder.embed(token_ids), None

    def _attend(self, first: int, layer: int) -> None:
        hidden, delta = self._pass_dense(first, layer)
        assert self._rows is not None
        self._hidden, normed = self._decoder.attend(layer, hidden, delta, self._rows)
        self._normed.copy_(normed)

    def _share(self, layer: int) -> None:
        expert = self._decoder.shared(layer)
        assert expert is not None
        self._shared = expert(self._normed)

    def _end(self, first: int) -> None:
        hidden, delta = self._pass_dense(first, self._decoder.config.num_layers)
        assert delta is not None
        self._logits.copy_(self._decoder.logits(hidden + delta.to(hidden.dtype)))

    def _pass_dense(self, first: int, end: int) -> tuple[Tensor, Tensor | None]:
        """Pass the dense layers ``first..end-1``."""
        hidden, delta = self._begin(first)
        for index in range(first, end):
            dense = self._decoder.dense(index)
            assert dense is not None
            assert self._rows is not None
            hidden, normed = self._decoder.attend(index, hidden, delta, self._rows)
            delta = dense(normed)
        return hidden, delta


class DecodeSegments:
    """The decode steps of one decoder over one cache, in segments."""

    def __init__(self, decoder: Decoder, cache: KVCache, max_rows: int, max_length: int) -> None:
        """Prepare steps of up to ``max_rows`` rows of ``max_length`` tokens; on a CUDA device they are captured."""
        self._shapes = DecodeShapes(max_rows, max_length)
        tensors = SegmentTensors(decoder, cache, self._shapes)
        captures = decoder.device.type == "cuda"
        if captures:
            tensors.divide(decoder, cache, whole=False)
        self._steps: dict[int, SegmentedDecode] = {}
        # The largest first: the others fit its memory.
        for size in reversed(self._shapes.sizes):
            step = self._steps[size] = SegmentedDecode(decoder, cache, tensors, size)
            if captures:
                step.capture()

    def takes(self, batch: StepBatch) -> bool:
        """See ``DecodeShapes.takes``."""
        return self._shapes.takes(batch)

    async def forward(self, batch: StepBatch, moe: MoELayer) -> Tensor:
        """Compute as ``Decoder.forward`` a batch that ``takes`` accepts."""
        return await self._steps[self._shapes.size_of(batch)].forward(batch, moe)
