"""One attempt to place a decision, and its outcome in the log."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from msgspec.structs import replace

from moesaic.errors import MoesaicError
from moesaic.messages.decisions import DecisionOutcome, PlacementDecision
from moesaic.messages.placement import Placement
from moesaic.services.scheduler.log import DecisionLog


class Attempt:
    """Progress of one attempt.

    Attributes:
        outcome: as the log has it at the end.
    """

    def __init__(
        self, decisions: DecisionLog, decision_id: str, told: Callable[[int], None]
    ) -> None:
        self._log, self._told, self._began_s = decisions, told, time.monotonic()
        # Unless something else comes to be known.
        self.outcome = DecisionOutcome(decision_id=decision_id, failure="the scheduler was stopped")

    async def begun(self, epoch: int) -> None:
        """Log the epoch that is prepared: a later leader sees by it whether it was committed."""
        self._told(epoch)
        self.outcome = replace(self.outcome, tried=epoch)
        await self._log.note_outcome(replace(self.outcome, failure=""))

    def committed(self, placement: Placement) -> None:
        """Note that it is done."""
        seconds = round(time.monotonic() - self._began_s, 3)
        self.outcome = replace(self.outcome, epoch=placement.epoch, seconds=seconds, failure="")


@asynccontextmanager
async def attempting(
    decisions: DecisionLog, decision: PlacementDecision, told: Callable[[int], None]
) -> AsyncIterator[Attempt]:
    """Log what becomes of a decision in the block, however that ends.

    Args:
        decisions: the log.
        decision: that is placed.
        told: called with the epoch when it is known.
    """
    attempt = Attempt(decisions, decision.decision_id, told)
    try:
        yield attempt
    except MoesaicError as error:
        attempt.outcome = replace(attempt.outcome, failure=str(error))
        raise
    finally:
        await decisions.note_outcome(attempt.outcome)
