"""Notes of what goes wrong on the way to expert workers: log events and counts."""

from collections.abc import Sequence

import structlog
from prometheus_client import Counter

from moesaic.dispatch.contract import Step
from moesaic.errors import MoesaicError, StaleEpoch

log = structlog.get_logger()

DIVERGENCES = Counter(
    "moesaic_gate_divergence_total",
    "Layers whose expert workers made different decisions about the same rows",
)


class DispatchNotes:
    """Notes of one dispatcher."""

    def __init__(self) -> None:
        """Begin with nothing known."""
        self._refused = "", 0  # the last peer that did not know an epoch, and that epoch

    def failure(self, step: Step, layer: int, peer: str, cause: MoesaicError) -> None:
        """Log an exchange that failed."""
        log.warning(
            "expert_worker.failed", peer=peer, layer=layer, epoch=step.epoch, cause=str(cause)
        )

    def divergence(self, step: Step, layer: int, digests: Sequence[int]) -> None:
        """Log workers that decided differently; ``digests`` are those of their decisions."""
        DIVERGENCES.inc()
        log.warning("gate.diverged", layer=layer, epoch=step.epoch, digests=list(map(hex, digests)))

    def refusal(self, peer: str, epoch: int, cause: StaleEpoch) -> None:
        """Log a refused step, once: without Redis, steps may continue to ask for a retired epoch."""
        if self._refused != (peer, epoch):
            self._refused = peer, epoch
            log.warning("step.refused", peer=peer, epoch=epoch, cause=str(cause))
