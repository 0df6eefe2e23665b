"""Steps that are one call each, with experts in other processes."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.dispatch.contract import Step
from moesaic.dispatch.routed.dispatcher import RoutedDispatcher
from moesaic.dispatch.routed.fastest import FastestWay
from moesaic.errors import MoesaicError
from moesaic.models.layers.step_batch import StepBatch
from moesaic.models.layers.whole_steps import WholeSteps

AWAKE_NS = (0, 1_000_000)  # longer than the experts of a layer of a few rows take
MOST_PARTS = 2  # more take longer, for experts are read again for every part


@dataclass(frozen=True)
class _Way:
    """One way to compute a step."""

    parts: int
    threads: int
    awake_ns: int  # the longest wait awake, here and on the experts' side


class RoutedSteps:
    """Computes steps without Python between their layers, as long as nothing rare happens.

    Attention has all threads, which sleep while experts are waited for; to wake them pays for many rows.
    Two parts of a step overlap attention and experts; that pays where neither has all cores. To wait
    awake saves the time of waking up; it costs those who share the core. What is best differs by
    machine, neighbours and size of steps, so it is measured again and again.
    """

    def __init__(
        self, dispatcher: RoutedDispatcher, whole: WholeSteps, hidden_size: int, parts: int = 0
    ) -> None:
        """Compute by ``whole`` on the routes of ``dispatcher``, in ``parts`` where rows allow; 0: by measurement."""
        self._dispatcher, self._whole, self._hidden_size = dispatcher, whole, hidden_size
        threads = sorted({1, torch.get_num_threads()})
        wanted = [parts] if parts else range(1, MOST_PARTS + 1)
        self._fastest = FastestWay(
            [_Way(p, t, a) for p in wanted for t in threads for a in AWAKE_NS]
        )
        self._next = self._fastest.ways[0]

    @property
    def layers_done(self) -> int:
        """Number of layers computed so far, of all parts; grows while a step runs."""
        return self._whole.layers_done

    def num_parts(self, num_rows: int) -> int:
        """See ``Shortcut.num_parts``."""
        self._next = self._fastest.choose(num_rows)
        return self._next.parts

    async def forward(self, step: Step, batches: Sequence[StepBatch]) -> Tensor | None:
        """Compute the parts of a step side by side.

        Returns:
            float32 ``[R, vocab]``; ``None``: the step has to be computed layer by layer. What has been
            computed of it so far changes nothing.

        Raises:
            ExpertUnavailable: see ``Dispatcher.dispatch``.
            StaleEpoch: the same.
        """
        native, way = self._dispatcher.native, self._next
        asks = native.asks_of(step.route, self._hidden_size)
        if asks is None or not self._dispatcher.goes_directly(step.route, asks.by_layer):
            return None
        started = time.perf_counter()
        apart = native.apart(asks, step.step_id, way.awake_ns)
        logits, failed = self._whole.forward_apart(batches, apart, way.threads)
        native.note(apart)
        if failed is None:
            num_rows = sum(len(batch.token_ids) for batch in batches)
            self._fastest.took(way, num_rows, time.perf_counter() - started)
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
