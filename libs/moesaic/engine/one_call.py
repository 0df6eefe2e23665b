"""Whole steps whose experts are in this process, as the engine takes them."""

from collections.abc import Sequence
from typing import Protocol

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

    def __init__(self, whole: StepsInOneCall) -> None:
        """Compute by ``whole``."""
        self._whole = whole

    @property
    def layers_done(self) -> int:
        """See ``Shortcut.layers_done``."""
        return self._whole.layers_done

    def num_parts(self, num_rows: int) -> int:
        """See ``Shortcut.num_parts``: nothing is waited for, so nothing overlaps."""
        return 1

    async def forward(self, step: Step, batches: Sequence[StepBatch]) -> Tensor | None:
        """See ``Shortcut.forward``."""
        if len(batches) > 1 or not self._whole.takes(batches[0]):
            return None
        return self._whole.forward(batches[0])
