"""Whole steps whose experts are in this process, as the engine takes them."""

from collections.abc import Callable, Sequence
from typing import Protocol, cast

from torch import Tensor

from moesaic.dispatch.contract import Step
from moesaic.models.layers.step_batch import StepBatch


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


class LocalSteps:
    """A ``Shortcut`` for a decoder whose experts are all in this process."""

    def __init__(self, whole_of: Callable[[Step], StepsInOneCall | None]) -> None:
        """Compute by what ``whole_of`` makes for the experts of a step; steps with one id have the same ones."""
        self._whole_of = whole_of
        self._step_id, self._whole = b"", cast(StepsInOneCall | None, None)
        self._layers_done = 0  # by earlier ones

    @property
    def layers_done(self) -> int:
        """See ``Shortcut.layers_done``."""
        return self._layers_done + (self._whole.layers_done if self._whole else 0)

    def num_parts(self, num_rows: int) -> int:
        """See ``Shortcut.num_parts``: nothing is waited for, so nothing overlaps."""
        return 1

    async def forward(self, step: Step, batches: Sequence[StepBatch]) -> Tensor | None:
        """See ``Shortcut.forward``."""
        if step.step_id != self._step_id:
            self._layers_done = self.layers_done
            self._step_id, self._whole = step.step_id, self._whole_of(step)
        if self._whole is None or len(batches) > 1 or not self._whole.takes(batches[0]):
            return None
        return self._whole.forward(batches[0])
