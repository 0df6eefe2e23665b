"""Ways to compute steps in fewer calls than one for each layer, as the engine takes them."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, cast

from torch import Tensor

from moesaic.dispatch.contract import Dispatcher, Step
from moesaic.models.layers.decode_segments import DecodeSegments
from moesaic.models.layers.step_batch import StepBatch


class Shortcut(Protocol):
    """Computes steps in fewer calls than one for each layer."""

    @property
    def layers_done(self) -> int:
        """Number of layers that it has computed so far, as any thread may ask."""
        ...

    def num_parts(self, num_rows: int) -> int:
        """Number of parts, ``num_rows`` at most, into which a step of so many rows is to be cut."""
        ...

    async def forward(self, step: Step, batches: Sequence[StepBatch]) -> Tensor | None:
        """Compute the parts of a step, side by side.

        A part may hold rows of a sequence whose rows before them are in the part before: parts pass each
        layer's attention in their order.

        Returns:
            The logits of all parts, one behind the other; see ``Decoder.forward``. ``None``: it cannot, and
            what it has done changes nothing.

        Raises:
            MoesaicError: see ``Dispatcher.dispatch``.
        """
        ...


class StepsInOneCall(Protocol):
    """Computes batches in one call each."""

    @property
    def layers_done(self) -> int:
        """Number of layers computed so far, as any thread may ask."""
        ...

    def takes(self, batch: StepBatch) -> bool:
        """Return true if it can compute ``batch``."""
        ...

    def forward(self, batch: StepBatch) -> Tensor:
        """See ``Decoder.forward``."""
        ...


class _OnePart:
    """Steps that are not cut."""

    def num_parts(self, num_rows: int) -> int:
        """See ``Shortcut.num_parts``."""
        return 1


class LocalSteps(_OnePart):
    """A ``Shortcut`` for a decoder whose experts are all in this process: nothing is waited for."""

    def __init__(self, whole_of: Callable[[Step], StepsInOneCall | None]) -> None:
        """Compute by what ``whole_of`` makes for the experts of a step; steps with one id have the same ones."""
        self._whole_of = whole_of
        self._step_id, self._whole = b"", cast("StepsInOneCall | None", None)
        self._layers_done = 0  # by earlier ones

    @property
    def layers_done(self) -> int:
        """See ``Shortcut.layers_done``."""
        return self._layers_done + (self._whole.layers_done if self._whole else 0)

    async def forward(self, step: Step, batches: Sequence[StepBatch]) -> Tensor | None:
        """See ``Shortcut.forward``."""
        if step.step_id != self._step_id:
            self._layers_done = self.layers_done
            self._step_id, self._whole = step.step_id, self._whole_of(step)
        [batch] = batches
        if self._whole is None or not self._whole.takes(batch):
            return None
        return self._whole.forward(batch)


class SegmentedSteps(_OnePart):
    """A ``Shortcut`` for a decoder that computes in segments, between exchanges of a dispatcher."""

    def __init__(self, segments: DecodeSegments, dispatcher: Dispatcher) -> None:
        """Compute by ``segments``, whose tensors are there once for each shape."""
        self._segments, self._dispatcher = segments, dispatcher
        self._layers_done = 0

    @property
    def layers_done(self) -> int:
        """See ``Shortcut.layers_done``."""
        return self._layers_done

    async def forward(self, step: Step, batches: Sequence[StepBatch]) -> Tensor | None:
        """See ``Shortcut.forward``."""
        [batch] = batches
        if not self._segments.takes(batch):
            return None

        def dispatch(layer: int, hidden_states: Tensor) -> Awaitable[Tensor]:
            self._layers_done += 1
            promised = batch.promised and batch.promised.enter(layer)
            return self._dispatcher.dispatch(step, layer, hidden_states, promised)

        return await self._segments.forward(batch, dispatch)
