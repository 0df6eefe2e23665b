"""Placing: every worker prepares a placement under a new epoch, then it is committed or given up."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog
from msgspec.structs import replace
from prometheus_client import Histogram

from moesaic.cluster.leadership import Leadership
from moesaic.cluster.placement_view import PlacementView
from moesaic.cluster.registry import Fleet
from moesaic.errors import InvalidInput, MoesaicError, NotReady, StaleEpoch
from moesaic.messages.placement import Incarnation, PlacedWorker, Placement
from moesaic.placement.decide.checking import violations
from moesaic.placement.decide.proposal import obsolete
from moesaic.services.scheduler.epochs import workers
from moesaic.services.scheduler.epochs.store import EpochStore
from moesaic.telemetry import spans
from moesaic.telemetry.metrics import counter

if TYPE_CHECKING:
    from opentelemetry.trace import Span

log = structlog.get_logger()

_LOOK_S = 1.0  # how often to see whether we still lead

_attempts = counter(
    "moesaic_migrations", "Placements attempted", "outcome", "committed", "refused", "failed"
)
_seconds = Histogram(
    "moesaic_migration_seconds", "Time from plan to commit of placements that succeeded"
)


class Obsolete(NotReady):
    """The placement that was being prepared is no longer wanted: decide again, at once."""


@dataclass(frozen=True)
class Cluster:
    """The cluster as a scheduler sees it, and the right to change it.

    Attributes:
        fleet: the workers there are.
        view: the committed placement.
        leadership: whether this scheduler leads.
        epochs: the store of placements.
    """

    fleet: Fleet
    view: PlacementView
    leadership: Leadership
    epochs: EpochStore


class Placer:
    """Places one placement at a time.

    Attributes:
        last_commit_s: monotonic time of the last commit by this process; -inf before.
        failed: workers that could not prepare the last placement.
    """

    def __init__(self, cluster: Cluster, *, prepare_timeout_s: float, load_share: float) -> None:
        self.last_commit_s = float("-inf")
        self.failed: list[Incarnation] = []
        self._fleet, self._view = cluster.fleet, cluster.view
        self._leadership, self._epochs = cluster.leadership, cluster.epochs
        self._prepare_timeout_s, self._load_share = prepare_timeout_s, load_share
        self._asked: set[Incarnation] = set()  # workers, for the highest epoch they have seen
        self._silent: set[Incarnation] = set()  # of them, those that did not answer

    async def place(
        self,
        wanted: Placement,
        *,
        urgent: bool,
        begun: Callable[[int], Awaitable[None]],
        target: Placement | None = None,
    ) -> Placement:
        """Make ``wanted`` the placement under a new epoch; serving continues meanwhile.

        Args:
            wanted: placement of any epoch.
            urgent: load as fast as can be; else workers that serve load at the pace that this allows.
            begun: called with the epoch as soon as it is known.
            target: the placement that ``wanted`` is a stage towards, if it is one.

        Raises:
            InvalidInput: it breaks a rule that every placement must keep; no worker was asked.
            Obsolete: the fleet changed so that it is no longer wanted.
            NotReady: another scheduler leads now.
            MoesaicError: a worker could not prepare; all were told to drop it.
        """
        with spans.within("epoch", {"moesaic.urgent": urgent}) as span:
            return await self._place(wanted, target, begun, span, urgent=urgent)

    async def _place(
        self,
        wanted: Placement,
        target: Placement | None,
        begun: Callable[[int], Awaitable[None]],
        span: "Span | None",
        *,
        urgent: bool,
    ) -> Placement:
        self.failed = []
        current, records = self._view.current, list(self._fleet.workers.values())
        if found := violations(wanted, records, current, is_stage=target is not None):
            log.error("placement.refused", violations=found)
            _attempts.labels("refused").inc()
            raise InvalidInput("placement", "; ".join(found))
        await self.learn(again=True)
        started = time.monotonic()
        epoch = await self._epochs.allocate()
        placement = replace(wanted, epoch=epoch, traceparent=_named(span, epoch))
        await begun(placement.epoch)
        log.info(
            "placement.planned",
            epoch=placement.epoch,
            workers=[worker.worker_id for worker in placement.workers],
            layers=len(placement.layers),
            num_experts=placement.num_experts,
            urgent=urgent,
        )
        try:
            with spans.within("prepare", {"moesaic.epoch": epoch}):
                await self._prepare(placement, target, urgent)
        except MoesaicError as error:
            self.note_newer(error)
            await self._give_up(placement)
            raise
        try:
            with spans.within("commit", {"moesaic.epoch": epoch}):
                await self._epochs.commit(placement)
        except NotReady:
            await self._give_up(placement)
            # PeerLost is another matter: it may be committed, the next step will see.
            raise
        self.last_commit_s = time.monotonic()
        seconds = self.last_commit_s - started
        _attempts.labels("committed").inc()
        _seconds.observe(seconds)
        log.info("placement.committed", epoch=placement.epoch, seconds=round(seconds, 3))
        return placement

    async def learn(self, *, again: bool = False) -> None:
        """Ask every worker once for the highest epoch it has seen: Redis may have lost the last.

        Args:
            again: also those that did not answer before.
        """
        records = {record.incarnation: record for record in self._fleet.workers.values()}
        keys = records.keys() - (self._asked - self._silent if again else self._asked)
        silent = await self._epochs.learn_from(records[key] for key in keys)
        self._silent = (self._silent - keys) | {record.incarnation for record in silent}
        self._asked = set(records)
        self._silent &= self._asked

    def note_newer(self, error: MoesaicError) -> None:
        """Record the later epoch that a worker's refusal names."""
        if isinstance(error, StaleEpoch):
            self._epochs.floor = max(self._epochs.floor, error.current)

    def require_wanted(self, placement: Placement, target: Placement | None = None) -> None:
        """Check that there is still a reason to make ``placement`` the one in force; see ``place``.

        Raises:
            Obsolete: the fleet changed so that it is no longer wanted, or another scheduler leads.
        """
        if cause := self._not_wanted(placement, target):
            raise Obsolete(cause)

    async def _prepare(self, placement: Placement, target: Placement | None, urgent: bool) -> None:
        """Have all workers load, for as long as the placement is wanted."""
        current = self._view.current
        preparing = asyncio.create_task(
            workers.prepare(
                placement,
                current,
                lambda worker: 1.0 if urgent else self._share_of(worker, current),
                self._prepare_timeout_s,
                self._note_failed,
            )
        )
        try:
            while not preparing.done():
                seen = self._fleet.version
                self.require_wanted(placement, target)
                news = asyncio.create_task(self._fleet.changed(seen))
                await asyncio.wait(
                    {preparing, news}, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED
                )
                news.cancel()
            await preparing
        finally:
            preparing.cancel()
            await asyncio.gather(preparing, return_exceptions=True)

    def _share_of(self, worker: PlacedWorker, current: Placement | None) -> float:
        """The share of its time in which a worker loads: all of it, if it does not serve yet.

        An edge agent that joins loads its experts over links that others need for serving.
        """
        record = self._fleet.workers.get(worker.worker_id)
        serving = {w.incarnation for w in current.workers} if current else set()
        joins = worker.incarnation not in serving
        at_edge = record is not None and record.role == "edge-agent"
        return 1.0 if joins and (current is None or not at_edge) else self._load_share

    def _note_failed(self, worker: PlacedWorker, error: MoesaicError) -> None:
        # That is our mistake.
        if not isinstance(error, StaleEpoch):
            self.failed.append(worker.incarnation)

    def _not_wanted(self, placement: Placement, target: Placement | None) -> str:
        if not self._leadership.held:
            return "the lead was lost"
        # The workers there are not known, and nothing could be committed.
        if self._fleet.stale:
            return ""
        return obsolete(placement, self._view.current, self._fleet.workers.values(), target)

    async def _give_up(self, placement: Placement) -> None:
        _attempts.labels("failed").inc()
        await workers.abort(placement)


def _named(span: "Span | None", epoch: int) -> str:
    """Note the epoch in the span that places it, and name the span; empty: there is none."""
    if span is None:
        return ""
    from moesaic.telemetry.otlp import traceparent_of

    span.set_attribute("moesaic.epoch", epoch)
    return traceparent_of(span)
