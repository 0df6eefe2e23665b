"""The log of decisions: each with its cause and, later, its outcome."""

import time
import uuid
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
import structlog
from msgspec.structs import replace

from moesaic.cluster.redis.bus import Bus
from moesaic.errors import PeerLost
from moesaic.messages.brownout import BrownoutDecision
from moesaic.messages.decisions import DecisionOutcome, PlacementDecision
from moesaic.messages.scaling import ScalingDecision

log = structlog.get_logger()

STREAM = "ctl:decisions"
KEPT = 1000  # decisions of each kind
STORED = 2 * KEPT  # entries in Redis
LOST = "its scheduler ended before it was done"
Entry = PlacementDecision | DecisionOutcome | BrownoutDecision | ScalingDecision
_Decision = TypeVar("_Decision", PlacementDecision, BrownoutDecision, ScalingDecision)
_entries: "msgspec.msgpack.Decoder[Entry]" = msgspec.msgpack.Decoder(Entry)


class DecisionLog:
    """Keeps decisions with their outcomes, newest last; Redis has them for the next leader."""

    def __init__(self, bus: Bus, wall_clock: Callable[[], float] = time.time) -> None:
        self._bus, self._wall_clock = bus, wall_clock
        self._placement: dict[str, PlacementDecision] = {}
        self._outcomes: dict[str, DecisionOutcome] = {}
        self._brownout: dict[str, BrownoutDecision] = {}
        self._scaling: dict[str, ScalingDecision] = {}
        self._unwritten: deque[Entry] = deque(maxlen=KEPT)

    async def refresh(self) -> None:
        """Write decisions that could not be written before, then read those of other schedulers.

        Without Redis, both are postponed and known decisions stay.
        """
        with suppress(PeerLost):
            await self._flush()
            for entry in await self._bus.latest(STREAM, _entries, STORED):
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

    async def note_brownout(self, decision: BrownoutDecision) -> None:
        """Log a decision of a worker, or its result; known ones change nothing."""
        known = self._brownout.get(decision.decision_id)
        is_older = known is not None and _has_result(known) and not _has_result(decision)
        if decision == known or is_older:
            return
        log.info(
            "brownout.decided",
            worker_id=decision.worker_id,
            reason=decision.reason,
            prefill=decision.prefill,
            decode=decision.decode,
            shedding=decision.shedding,
            scale=decision.scale,
            predicted_ttft_s=decision.predicted_ttft_s,
            measured_ttft_s=decision.measured_ttft_s,
        )
        await self._write(decision)

    def recent_brownout(self, count: int) -> list[BrownoutDecision]:
        """The last decisions of workers about brownout, newest first."""
        return _newest(self._brownout, count)

    async def note_scaling(self, decision: ScalingDecision) -> None:
        """Log a decision about numbers of workers, or report it again with its result."""
        log.info(
            "scaling.decided" if decision.decision_id not in self._scaling else "scaling.ended",
            decision_id=decision.decision_id,
            cause=decision.cause,
            adopted=decision.adopted,
            before=str(decision.before),
            wanted=str(decision.wanted),
            reason=decision.reason,
            bridged=decision.bridged,
            seconds=decision.seconds,
            failure=decision.failure,
        )
        await self._write(decision)

    def scaling(self, decision_id: str) -> ScalingDecision | None:
        """The decision of this id, if it is known still."""
        return self._scaling.get(decision_id)

    def recent_scaling(self, count: int) -> list[ScalingDecision]:
        """The last decisions about numbers of workers, newest first."""
        return _newest(self._scaling, count)

    async def close(self, current: int) -> None:
        """Give an outcome to the decisions whose end no scheduler saw.

        Only a leader that is placing nothing may call this: at its start, or when Redis did not say if a
        write was done.

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
        newest = _newest(self._placement, count)
        return [(decision, self._outcomes.get(decision.decision_id)) for decision in newest]

    def outcome_of(self, epoch: int) -> DecisionOutcome | None:
        """The outcome of the decision that an epoch was committed for."""
        found = (o for o in reversed(self._outcomes.values()) if o.epoch == epoch)
        return next(found, None)

    async def _write(self, entry: Entry) -> None:
        self._keep(entry)
        self._unwritten.append(entry)
        with suppress(PeerLost):
            await self._flush()

    async def _flush(self) -> None:
        while self._unwritten:
            entry = self._unwritten[0]
            await self._bus.append(STREAM, entry, max_entries=STORED)
            # Others may write meanwhile.
            if self._unwritten and self._unwritten[0] is entry:
                self._unwritten.popleft()

    def _keep(self, entry: Entry) -> None:
        match entry:
            case PlacementDecision():
                self._outcomes.pop(_add(self._placement, entry), None)
            case BrownoutDecision():
                _add(self._brownout, entry)
            case ScalingDecision():
                _add(self._scaling, entry)
            case _ if entry.decision_id in self._placement:
                self._outcomes[entry.decision_id] = entry


def _add(kept: dict[str, _Decision], decision: _Decision) -> str:
    """Keep a decision; return the id of the oldest one if it had to go for it."""
    kept[decision.decision_id] = decision
    oldest = next(iter(kept)) if len(kept) > KEPT else ""
    kept.pop(oldest, None)
    return oldest


def _newest(kept: dict[str, _Decision], count: int) -> list[_Decision]:
    return sorted(kept.values(), key=lambda decision: decision.at, reverse=True)[:count]


def _has_result(decision: BrownoutDecision) -> bool:
    return decision.measured_ttft_s is not None or decision.measured_tpot_s is not None
