"""When to plan anew, what to log of it, and whether plans kept their promise."""

import time
from collections.abc import Mapping, Sequence

import structlog
from prometheus_client import Gauge

from moesaic.messages.decisions import DecisionOutcome, PlacementDecision
from moesaic.messages.placement import Placement
from moesaic.messages.registry import WorkerRecord
from moesaic.placement.moves import moves
from services.scheduler.decisions import DecisionLog
from services.scheduler.planner import Plan, Planner
from services.scheduler.policies import PolicyStore
from services.scheduler.traffic import TrafficFeed

log = structlog.get_logger()

MAX_BACKOFF = 5  # doublings of the interval after plans that could not be carried out
AGAIN_S = 5.0  # after a plan that was interrupted
FIRST_MEASURED = 100  # batches; then whenever there are twice as many
STAYED_EVERY_S = 3600.0  # plans to stay are logged so often, while nothing else is decided

_busiest = Gauge(
    "moesaic_busiest_worker_experts",
    "most activated experts on one worker, mean of the batches under the epoch in force",
)


class Replanner:
    """Plans by traffic every ``interval_s``, and keeps the log of all placements."""

    def __init__(
        self,
        planner: Planner,
        feed: TrafficFeed,
        policies: PolicyStore,
        decisions: DecisionLog,
        interval_s: float,
    ) -> None:
        self._planner, self._feed = planner, feed
        self._policies, self._decisions = policies, decisions
        self._interval_s = interval_s
        self._next_s = time.monotonic() + interval_s
        self._load_bytes_per_s: float | None = None
        self._failures = 0  # of plans by traffic, one after the other
        self._stayed: tuple[int, str] = (0, "")  # epoch and policy of the last plan to stay
        self._stayed_s = float("-inf")

    def due(self) -> bool:
        """Whether the interval is over; then the next one begins."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return False
        self._next_s = now_s + self._interval_s
        return True

    async def plan(
        self, current: Placement, records: Sequence[WorkerRecord], policy: str = ""
    ) -> Plan:
        """What the policy would do; see ``Planner.plan``. One that is not worth while is logged now and
        then: the log is for what was done."""
        chosen = policy or self._policies.current.policy
        plan = await self._planner.plan(
            current, records, chosen, self._policies.current.pins, self._load_bytes_per_s
        )
        if not policy and not plan.worthwhile and self._is_news(plan, chosen):
            await self._decisions.note(cause="traffic", adopted=False, **_facts(plan))
        return plan

    def _is_news(self, plan: Plan, policy: str) -> bool:
        now_s, stayed = time.monotonic(), (plan.base_epoch, policy)
        if not plan.batches or (stayed == self._stayed and now_s - self._stayed_s < STAYED_EVERY_S):
            return False
        self._stayed, self._stayed_s = stayed, now_s
        return True

    def interrupted(self) -> None:
        """A plan was given up because the fleet changed: another one is due soon."""
        self._next_s = min(self._next_s, time.monotonic() + min(self._interval_s, AGAIN_S))

    async def close(self, current_epoch: int) -> None:
        """See ``DecisionLog.close``."""
        await self._decisions.close(current_epoch)

    async def note_plan(self, plan: Plan) -> PlacementDecision:
        """Log a plan that is carried out."""
        return await self._decisions.note(cause="traffic", adopted=True, **_facts(plan))

    async def note_order(
        self, current: Placement, wanted: Placement, known: Mapping[str, WorkerRecord]
    ) -> PlacementDecision:
        """Log what an operator wants."""
        needed = moves(current, wanted)
        return await self._decisions.note(
            cause="operator",
            adopted=True,
            reason="an operator asked for it",
            epoch_before=current.epoch,
            moves=len(needed),
            moved_bytes=len(needed) * _expert_bytes(wanted, known),
        )

    async def note_workers(
        self, current: Placement | None, wanted: Placement, known: Mapping[str, WorkerRecord]
    ) -> PlacementDecision:
        """Log what the coming and going of workers makes necessary."""
        before = {worker.worker_id for worker in current.workers} if current else set()
        after = {worker.worker_id for worker in wanted.workers}
        needed = moves(current, wanted)
        came, left = sorted(after - before), sorted(before - after)
        changes = [f"{', '.join(came)} came"] * bool(came) + [f"{', '.join(left)} left"] * bool(
            left
        )
        return await self._decisions.note(
            cause="workers",
            adopted=True,
            reason="; ".join(changes) or "a worker was started again or forgot its placement",
            epoch_before=current.epoch if current else 0,
            moves=len(needed),
            moved_bytes=len(needed) * _expert_bytes(wanted, known),
        )

    async def note_begun(self, outcome: DecisionOutcome) -> None:
        """Log which epoch is prepared for it: who leads next can see whether it was committed."""
        await self._decisions.note_outcome(outcome)

    async def note_outcome(
        self, decision: PlacementDecision, outcome: DecisionOutcome, *, overtaken: bool = False
    ) -> None:
        """Log what became of it, and learn how fast workers load.

        After a plan by traffic that could not be carried out the next ones wait longer and longer;
        not after one that the fleet has ``overtaken``.
        """
        await self._decisions.note_outcome(outcome)
        if decision.cause == "traffic" and overtaken:
            self.interrupted()
        elif decision.cause == "traffic":
            self._failures = min(self._failures + 1, MAX_BACKOFF) if outcome.failure else 0
            self._next_s = time.monotonic() + self._interval_s * 2**self._failures
        paced = decision.cause != "workers"  # others may have loaded without rest
        if paced and outcome.epoch and outcome.seconds and decision.moved_bytes:
            self._load_bytes_per_s = decision.moved_bytes / outcome.seconds

    async def measure(self, current: Placement) -> None:
        """Set what was measured under the epoch in force beside what was predicted for it."""
        served = self._feed.served(current)
        if served is None:
            return
        batches, busiest = served
        if batches:
            _busiest.set(busiest / batches)
        outcome = self._decisions.outcome_of(current.epoch)
        if outcome and batches >= max(FIRST_MEASURED, 2 * outcome.measured_batches):
            await self._decisions.note_outcome(
                DecisionOutcome(
                    decision_id=outcome.decision_id,
                    measured_after=round(busiest / batches, 3),
                    measured_batches=batches,
                )
            )


def _expert_bytes(placement: Placement, known: Mapping[str, WorkerRecord]) -> int:
    names = [worker.worker_id for worker in placement.workers]
    return max((known[name].expert_bytes for name in names if name in known), default=0)


def _facts(plan: Plan) -> dict[str, object]:
    return {
        "reason": plan.reason,
        "policy": plan.policy,
        "epoch_before": plan.base_epoch,
        "moves": len(plan.moves),
        "moved_bytes": plan.moved_bytes,
        "batches": plan.batches,
        "sampled_batches": plan.sampled_batches,
        "predicted_before": plan.before,
        "predicted_after": plan.after,
        "predicted_s": plan.seconds,
    }
