"""Reports to the scheduler, window by window, the experts that batches activate."""

import asyncio
from dataclasses import dataclass, field

import numpy as np
import structlog
from numpy.typing import NDArray
from prometheus_client import Counter

from moesaic.cluster.redis.bus import Bus
from moesaic.errors import PeerLost
from moesaic.experts.activations import ActivationMeter
from moesaic.experts.epochs import Epochs
from moesaic.experts.load_series import show_load
from moesaic.messages.activation import ActivationWindow

log = structlog.get_logger()

STREAM = "ctl:activations"
KEPT = 64  # windows in Redis, of all workers: five minutes of them, each up to a megabyte

_windows = Counter("moesaic_activation_windows", "Windows of counted batches", ["outcome"])


@dataclass
class LayerTotals:
    """One layer since this worker started."""

    batches: int
    tokens: NDArray[np.int64]  # [E]
    active: NDArray[np.int64]  # [E]


@dataclass
class ActivationReporter:
    """Sends a report every ``window_s`` in which there was traffic; without Redis it is dropped.

    Attributes:
        num_series: experts whose load has a series of its own.
        totals: by decoder layer, of all windows so far.
    """

    bus: Bus
    meter: ActivationMeter
    epochs: Epochs
    worker_id: str
    generation: int
    model_digest: str
    window_s: float
    num_series: int = 0
    totals: dict[int, LayerTotals] = field(default_factory=dict)
    _dropped: int = 0

    async def run(self) -> None:
        """Report for ever."""
        while True:
            await asyncio.sleep(self.window_s)
            try:
                await self._report()
            except PeerLost:
                self._dropped += 1
                _windows.labels("dropped").inc()
            except Exception:  # a worker that cannot count can still serve
                log.exception("activations.failed")

    async def _report(self) -> None:
        report = self.meter.report(
            worker_id=self.worker_id,
            generation=self.generation,
            model_digest=self.model_digest,
            epoch=self.epochs.in_force,
            dropped=self._dropped,
        )
        show_load(report.window, self.num_series)
        if not report.window.layers:
            return
        self._add(report.window)
        await self.bus.append(STREAM, report, max_entries=KEPT)
        self._dropped = 0
        _windows.labels("sent").inc()

    def _add(self, window: ActivationWindow) -> None:
        for layer in window.layers:
            total = self.totals.get(layer.layer)
            if total is None:
                zeros = np.zeros(window.num_experts, np.int64)
                total = self.totals[layer.layer] = LayerTotals(0, zeros, zeros.copy())
            total.batches += layer.batches
            total.tokens += np.asarray(layer.tokens, np.int64)
            total.active += np.asarray(layer.active_batches, np.int64)
