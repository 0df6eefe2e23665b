"""Steps that are one call each, with experts in other processes."""

from collections.abc import Sequence

from torch import Tensor

from moesaic.dispatch.contract import Step
from moesaic.dispatch.routed.dispatcher import RoutedDispatcher
from moesaic.errors import MoesaicError
from moesaic.models.layers.step_batch import StepBatch
from moesaic.models.layers.whole_steps import WholeSteps


class RoutedSteps:
    """Computes steps without Python between their layers, as long as nothing rare happens."""

    def __init__(self, dispatcher: RoutedDispatcher, whole: WholeSteps, hidden_size: int) -> None:
        """Compute by ``whole`` on the routes of ``dispatcher``."""
        self._dispatcher, self._whole, self._hidden_size = dispatcher, whole, hidden_size

    @property
    def layers_done(self) -> int:
        """Number of layers computed so far, of all parts; grows while a step runs."""
        return self._whole.layers_done

    async def forward(self, step: Step, batches: Sequence[StepBatch]) -> Tensor | None:
        """Compute the parts of a step side by side.

        Returns:
            float32 ``[R, vocab]``; ``None``: the step has to be computed layer by layer. What has been
            computed of it so far changes nothing.

        Raises:
            ExpertUnavailable: see ``Dispatcher.dispatch``.
            StaleEpoch: the same.
        """
        native, asks = self._dispatcher.native, None
        if self._dispatcher.goes_directly:
            asks = native.asks_of(step.route, self._hidden_size)
        if asks is None:
            return None
        apart = native.apart(asks, step.step_id)
        logits, failed = self._whole.forward_apart(batches, apart)
        native.note(apart)
        if failed is None:
            return logits
        # Python settles what failed, so that nothing is awaited any more, and tells of errors. If there is
        # none, workers have decided differently, or have not been asked for this layer before.
        left = [
            (
                part.layer,
                native.unsettled(asks, step.step_id, part.layer, part.seq, part.deadline_ns),
            )
            for part in failed
            if part.layer >= 0
        ]
        found = [(layer, each, await each.outcomes()) for layer, each in left]
        for layer, each, outcomes in found:
            for link, outcome in zip(each.ask.links, outcomes, strict=True):
                if isinstance(outcome, MoesaicError):
                    raise self._dispatcher.failure(step, layer, link, outcome)
        return None
