"""Steps in segments, whose experts are in other processes, as the engine takes them."""

from collections.abc import Awaitable, Sequence

from torch import Tensor

from moesaic.dispatch.contract import Dispatcher, Step
from moesaic.models.layers.decode_segments import DecodeSegments
from moesaic.models.layers.step_batch import StepBatch


class SegmentedSteps:
    """A ``Shortcut`` for a decoder that computes in segments, between exchanges of a dispatcher."""

    def __init__(self, segments: DecodeSegments, dispatcher: Dispatcher, parts: int) -> None:
        """Compute by ``segments``; cut steps that are too large for them into ``parts``."""
        self._segments, self._dispatcher, self._parts = segments, dispatcher, parts
        self._layers_done = 0

    @property
    def layers_done(self) -> int:
        """See ``Shortcut.layers_done``."""
        return self._layers_done

    def num_parts(self, num_rows: int) -> int:
        """See ``Shortcut.num_parts``: the tensors of a shape are there once."""
        return 1 if num_rows <= self._segments.most_rows else self._parts

    async def forward(self, step: Step, batches: Sequence[StepBatch]) -> Tensor | None:
        """See ``Shortcut.forward``."""
        if len(batches) > 1 or not self._segments.takes(batches[0]):
            return None

        def dispatch(layer: int, hidden_states: Tensor) -> Awaitable[Tensor]:
            self._layers_done += 1
            return self._dispatcher.dispatch(step, layer, hidden_states)

        return await self._segments.forward(batches[0], dispatch)
