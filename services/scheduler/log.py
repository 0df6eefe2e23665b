"""The log of decisions: each with its cause and, later, its outcome."""

import time
import uuid
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import structlog
from msgspec.structs import replace

from moesaic.cluster.redis.bus import Bus
from moesaic.errors import PeerLost
from moesaic.messages.decisions import DecisionOutcome, PlacementDecision

log = structlog.get_logger()

STREAM = "ctl:decisions"
KEPT = 1000  # entries in Redis, and decisions here
LOST = "its scheduler ended before it was done"
_entries: "msgspec.msgpack.Decoder[PlacementDecision | DecisionOutcome]" = msgspec.msgpack.Decoder(
    PlacementDecision | DecisionOutcome
)


class DecisionLog:
    """Keeps decisions with their outcomes, newest last; Redis has them for the next leader."""

    def __init__(self, bus: Bus, wall_clock: Callable[[], float] = time.time) -> None:
        self._bus, self._wall_clock = bus, wall_clock
        self._decisions: dict[str, PlacementDecision] = {}
        self._outcomes: dict[str, DecisionOutcome] = {}
        self._unwritten: deque[PlacementDecision | DecisionOutcome] = deque(maxlen=KEPT)

    async def refresh(self) -> None:
        """Write what could not be written, then read what other schedulers have decided.

        Without Redis, both wait and what is known stays.
        """
        with suppress(PeerLost):
            await self._flush()
            for entry in await self._bus.latest(STREAM, _entries, KEPT):
                self._keep(entry)

    async def note(self, **fields: Any) -> PlacementDecision:
        """Log a decision made now; the fields are those of ``PlacementDecision``."""
        decision = PlacementDecision(decision_id=uuid.uuid4().hex, at=self._wall_clock(), **fields)
        log.info(
            "placement.decided",
            cause=decision.cause,
            adopted=decision.adopted,
            reason=decision.reason,
            policy=decision.policy,
            moves=decision.moves,
            predicted_before=decision.predicted_before,
            predicted_after=decision.predicted_after,
        )
        await self._write(decision)
        return decision

    async def note_outcome(self, outcome: DecisionOutcome) -> None:
        """Log the outcome of a decision; fields left at their defaults keep what was logged before."""
        before = self._outcomes.get(outcome.decision_id)
        if before is not None:
            defaults = DecisionOutcome(decision_id=outcome.decision_id)
            changed = {
                name: value
                for name in outcome.__struct_fields__
                if (value := getattr(outcome, name)) != getattr(defaults, name)
            }
            outcome = replace(before, **changed)
        await self._write(outcome)

    async def close(self, current: int) -> None:
        """Give an outcome to the decisions whose end no scheduler saw.

        Only a leader that is placing nothing may call this: at its beginning, or when Redis did not say
        whether it had done what was asked.

        Args:
            current: the committed epoch.
        """
        await self.refresh()
        for decision, outcome in self.recent(KEPT):
            ended = outcome or DecisionOutcome(decision_id=decision.decision_id)
            if not decision.adopted or ended.epoch:
                continue
            if ended.tried and ended.tried == current:
                await self._write(replace(ended, epoch=current, failure=""))
            elif not ended.failure:
                await self._write(replace(ended, failure=LOST))

    def recent(self, count: int) -> list[tuple[PlacementDecision, DecisionOutcome | None]]:
        """The last decisions, newest first."""
        newest = sorted(self._decisions.values(), key=lambda d: d.at, reverse=True)[:count]
        return [(decision, self._outcomes.get(decision.decision_id)) for decision in newest]

    def outcome_of(self, epoch: int) -> DecisionOutcome | None:
        """The outcome of the decision that an epoch was committed for."""
        found = (o for o in reversed(self._outcomes.values()) if o.epoch == epoch)
        return next(found, None)

    async def _write(self, entry: PlacementDecision | DecisionOutcome) -> None:
        self._keep(entry)
        self._unwritten.append(entry)
        with suppress(PeerLost):
            await self._flush()

    async def _flush(self) -> None:
        while self._unwritten:
            entry = self._unwritten[0]
            await self._bus.append(STREAM, entry, max_entries=KEPT)
            if self._unwritten and self._unwritten[0] is entry:  # others may write meanwhile
                self._unwritten.popleft()

    def _keep(self, entry: PlacementDecision | DecisionOutcome) -> None:
        if isinstance(entry, PlacementDecision):
            self._decisions[entry.decision_id] = entry
        elif entry.decision_id in self._decisions:
            self._outcomes[entry.decision_id] = entry
        while len(self._decisions) > KEPT:
            oldest = next(iter(self._decisions))
            del self._decisions[oldest]
            self._outcomes.pop(oldest, None)
