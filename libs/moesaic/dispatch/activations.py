"""Counts what batches activate, and how evenly it is served."""

import threading
from collections import Counter

from torch import Tensor

from moesaic.messages.activation import ActivationWindow
from moesaic.messages.activation_report import ActivationReport, ServedBatches
from moesaic.placement.recorder import ActivationRecorder


class ActivationMeter:
    """One worker's counts, for the scheduler. ``record`` is for the engine's thread, the rest for
    any other one."""

    def __init__(self, num_experts: int) -> None:
        self._recorder = ActivationRecorder(num_experts)
        self._lock = threading.Lock()
        self._batches: Counter[int] = Counter()  # by epoch
        self._busiest: Counter[int] = Counter()

    def record(self, epoch: int, layer: int, topk_ids: Tensor, busiest: int) -> None:
        """Count one dispatch batch.

        Args:
            epoch: that it runs under.
            layer: the decoder layer.
            topk_ids: int ``[T, k]``.
            busiest: distinct experts that the worker with most of them has to compute.
        """
        if not topk_ids.numel():
            return
        self._recorder.record(layer, topk_ids.cpu().numpy())
        with self._lock:
            self._batches[epoch] += 1
            self._busiest[epoch] += busiest

    def report(
        self, *, worker_id: str, generation: int, model_digest: str, epoch: int, dropped: int = 0
    ) -> ActivationReport:
        """What was counted since the last call; then counting starts anew."""
        window: ActivationWindow = self._recorder.window(
            worker_id=worker_id, generation=generation, model_digest=model_digest, epoch=epoch
        )
        with self._lock:
            batches, self._batches = self._batches, Counter()
            busiest, self._busiest = self._busiest, Counter()
        served = [
            ServedBatches(epoch=e, batches=batches[e], busiest=busiest[e]) for e in sorted(batches)
        ]
        return ActivationReport(window=window, served=served[-64:], dropped=dropped)
