"""Counts the experts that batches activate, and how evenly these are served."""

import threading
import time
from collections import Counter
from collections.abc import Callable

from torch import Tensor

from moesaic.messages.activation import ActivationReport, ServedBatches
from moesaic.messages.scheduling import SCHEDULINGS, ExpertScheduling
from moesaic.placement.traffic.recorder import ActivationRecorder


class ActivationMeter:
    """One worker's counts, for the scheduler.

    ``record`` is for the engine's thread, ``report`` for any other one.
    """

    def __init__(self, num_experts: int) -> None:
        self._recorder = ActivationRecorder(num_experts)
        self._lock = threading.Lock()
        self._began_s = time.monotonic()  # of the window
        self._batches: Counter[int] = Counter()  # by epoch
        self._busiest: Counter[int] = Counter()
        self._scheduling: ExpertScheduling = "aebs"
        self._take_more: Callable[[], list[tuple[int, int, int, int, Tensor]]] = list

    def count_also(self, take: Callable[[], list[tuple[int, int, int, int, Tensor]]]) -> None:
        """Count the batches that ``take`` gives; see ``AnswersWithoutPython.take_batches``."""
        self._take_more = take

    def take_more(self) -> None:
        """Count the batches that were answered without Python."""
        for epoch, layer, code, busiest, ids in self._take_more():
            self.record(epoch, layer, ids, busiest, SCHEDULINGS[code])

    def record(
        self,
        epoch: int,
        layer: int,
        topk_ids: Tensor,
        busiest: int | None,
        scheduling: ExpertScheduling = "aebs",
    ) -> None:
        """Count one dispatch batch.

        Args:
            epoch: epoch of the batch.
            layer: the decoder layer.
            topk_ids: int ``[T, k]``.
            busiest: distinct experts that the worker with most of them has to compute; None: not known.
            scheduling: how its replicas were chosen.
        """
        if not topk_ids.numel():
            return
        ids = topk_ids.cpu().numpy()
        # A report has all of a batch, or nothing.
        with self._lock:
            self._recorder.record(layer, ids)
            if busiest is not None:
                self._batches[epoch] += 1
                self._busiest[epoch] += busiest
            self._scheduling = scheduling

    def report(
        self, *, worker_id: str, generation: int, model_digest: str, epoch: int, dropped: int = 0
    ) -> ActivationReport:
        """Take the counts since the last call; counting starts anew."""
        self.take_more()
        with self._lock:
            now_s = time.monotonic()
            taken = self._recorder.take(now_s - self._began_s)
            self._began_s = now_s
            batches, self._batches = self._batches, Counter()
            busiest, self._busiest = self._busiest, Counter()
            scheduling = self._scheduling
        window = taken.window(
            worker_id=worker_id, generation=generation, model_digest=model_digest, epoch=epoch
        )
        served = [
            ServedBatches(epoch=e, batches=batches[e], busiest=busiest[e]) for e in sorted(batches)
        ]
        return ActivationReport(
            window=window, served=served[-64:], dropped=dropped, scheduling=scheduling
        )
