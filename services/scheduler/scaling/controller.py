"""The loop around the decisions about numbers of workers. The wanted shape is stored before it is
carried out.

A later leader finds it and continues: actuators only begin what is not in progress.
"""

import asyncio
import math
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import structlog
from msgspec.structs import replace
from prometheus_client import Gauge

from moesaic.cluster.leadership import Leadership
from moesaic.cluster.placement_view import PlacementView
from moesaic.cluster.registry import Fleet
from moesaic.errors import InvalidInput, MoesaicError, NotReady, PeerLost
from moesaic.messages.brownout import BrownoutPolicy
from moesaic.messages.scaling import FleetShape, ScalingAction, ScalingDecision, ScalingPolicy
from moesaic.scaling.contract import RecentDemand, ScalingChoice, ScalingState, ShapeBounds
from moesaic.services.scheduler.log import LOST, DecisionLog
from moesaic.services.scheduler.scaling.actions import OVERTAKEN, ActionStore
from moesaic.services.scheduler.scaling.actuators.contract import Actuator
from moesaic.services.scheduler.scaling.facts import (
    active_attention,
    active_shape,
    fewest_expert_workers,
    is_there,
    longest_load_s,
    objectives_of,
    shape_bounds,
    thresholds_now,
)
from moesaic.services.scheduler.scaling.feed import LoadFeed
from moesaic.services.scheduler.versioned import VersionedStore

log = structlog.get_logger()

_LOOK_S = 1.0
_SOON_S = 0.2  # while workers are on the way
_RECENT = 1000  # decisions that are looked at
PATIENCE_S = 600.0  # beside the time for loading; then a shape that is not there is given up
NO_BRIDGE = "brownout lowers nothing: nothing bridges the time until then"

_active = Gauge("moesaic_scaling_workers", "Active workers", ["side"])
_wanted = Gauge(
    "moesaic_scaling_wanted_workers", "Workers that scaling wants to be active", ["side"]
)


class Predicting(Protocol):
    """Demand, and the choice that follows from it."""

    def demand(self, policy: ScalingPolicy) -> RecentDemand:
        """Return the demand of the policy's window."""
        ...

    async def choose(self, policy: ScalingPolicy, state: ScalingState) -> ScalingChoice | None:
        """Return a shape that would be better than the one there is, if there is one."""
        ...


@dataclass(frozen=True)
class ScalingParts:
    """Parts of the scheduler that the controller works with.

    Attributes:
        fleet: the present workers.
        view: the placement in force.
        leadership: only a leader acts.
        policy: policy of scaling.
        actions: the wanted shape.
        feed: measured load.
        predictor: decides.
        decisions: log of decisions.
        brownout: its thresholds help until workers have come.
        actuator: brings workers.
    """

    fleet: Fleet
    view: PlacementView
    leadership: Leadership
    policy: VersionedStore[ScalingPolicy]
    actions: ActionStore
    feed: LoadFeed
    predictor: Predicting
    decisions: DecisionLog
    brownout: VersionedStore[BrownoutPolicy]
    actuator: Actuator


_Step = Literal["look", "choose", "carry out"]
Chosen = tuple[ScalingPolicy, ScalingState, ScalingChoice | None]


class ScalingController:
    """Decides about numbers of workers while its scheduler leads, and has them carried out."""

    def __init__(
        self,
        parts: ScalingParts,
        wall_clock: Callable[[], float] = time.time,
        pause: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        """``pause``: waits for some seconds between two looks."""
        self._troubles: dict[_Step, str] = {}
        self._parts, self._wall_clock, self._pause = parts, wall_clock, pause
        self._turn = asyncio.Lock()  # between the loop and operators' orders
        self._closed = False  # all decisions but that of the action have an end
        self._decided_at = 0.0
        self._told: tuple[object, ...] = ()  # the last choice that was not carried out
        self._choosing: asyncio.Task[Chosen] | None = None

    @property
    def trouble(self) -> str:
        """Causes that prevent decisions or actions, for people; empty if none does."""
        return "; ".join(dict.fromkeys(self._troubles.values()))

    @property
    def shape(self) -> FleetShape:
        """The active workers."""
        return active_shape(self._parts.fleet)

    @property
    def actuator(self) -> str:
        """Name of the actuator."""
        return self._parts.actuator.name

    async def bounds(self) -> tuple[ShapeBounds | None, str]:
        """Return the possible shapes, None if the actuator does not answer; and the problem, for people."""
        try:
            return await self._bounds(self._parts.policy.current), self.trouble
        except MoesaicError as error:
            return None, str(error)

    async def run(self) -> None:
        """Look every second while this scheduler leads, for ever."""
        try:
            await self._run()
        finally:
            if self._choosing is not None:
                self._choosing.cancel()

    async def _run(self) -> None:
        while True:
            pause_s = _LOOK_S
            try:
                if self._parts.leadership.held and not self._parts.fleet.stale:
                    async with self._turn:
                        await self._look()
                    action = self._parts.actions.action
                    pause_s = _SOON_S if action is not None and not action.ended else _LOOK_S
                    self._troubles.pop("look", None)
                else:
                    self._closed = False
                    self._troubles.clear()
            except MoesaicError as error:  # Redis is gone, or another scheduler leads now
                self._note_trouble("look", error)
                self._closed = False
            except Exception as error:  # placements must not want for a scheduler because of it
                log.exception("scaling.failed")
                self._note_trouble("look", error)
            await self._pause(pause_s)

    async def order(self, shape: FleetShape, reason: str, *, keep_mode: bool = True) -> str:
        """Order a shape for an operator.

        Args:
            shape: the wanted shape.
            reason: reason, for people.
            keep_mode: stay in mode auto, which may change the numbers again; else it becomes advise.

        Returns:
            The id of the decision that brings it, an earlier one if that is in progress; empty if the shape is reached.

        Raises:
            InvalidInput: the fleet cannot have it.
            NotReady: another scheduler leads now, or wrote at the same time; or no shape can hold every expert.
            MoesaicError: Redis or the actuator did not answer.
        """
        async with self._turn:
            parts = self._parts
            await parts.policy.keep()
            await parts.actions.keep()
            # An operator may leave the policy's bounds.
            bounds = await self._bounds(ScalingPolicy())
            for side in ("attention", "experts"):
                least, most = getattr(bounds.least, side), getattr(bounds.most, side)
                if not least <= getattr(shape, side) <= most:
                    raise InvalidInput(
                        f"shape.{side}", f"must be in {least}..{most}, got {getattr(shape, side)}"
                    )
            # First: an action of an operator never stands in mode auto, whatever happens in between.
            if parts.policy.current.mode == "auto" and not keep_mode:
                await parts.policy.change(lambda before: replace(before, mode="advise"))
            action, now = parts.actions.action, self.shape
            if action is not None and not action.ended:
                if action.shape == shape:
                    return action.decision_id
            elif shape == now:
                return ""
            decision = self._decision(
                cause="operator", adopted=True, reason=reason, before=now, wanted=shape
            )
            await self._adopt(decision)
            return decision.decision_id

    async def _look(self) -> None:
        parts = self._parts
        await parts.policy.keep()
        await parts.actions.keep()
        if not self._closed:
            await self._close()
            self._closed = True
        await self._carry_out()
        if self._choosing is not None and self._choosing.done():
            task, self._choosing = self._choosing, None
            await self._conclude(task)
        policy = parts.policy.current
        if policy.mode == "off":
            self._troubles.pop("choose", None)
        elif self._choosing is None and self._due(policy):
            self._decided_at = self._wall_clock()
            # Beside this loop: it may take seconds, for which nobody shall wait.
            self._choosing = asyncio.create_task(self._choose(policy), name="scaling choice")

    async def _conclude(self, task: asyncio.Task[Chosen]) -> None:
        try:
            policy, state, choice = task.result()
        except MoesaicError as error:
            self._note_trouble("choose", error)
        except Exception as error:  # it was made from numbers that others report
            log.error("scaling.failed", exc_info=error)
            self._note_trouble("choose", error)
        else:
            self._troubles.pop("choose", None)
            await self._decide(policy, state, choice)

    def _due(self, policy: ScalingPolicy) -> bool:
        return abs(self._wall_clock() - self._decided_at) >= policy.interval_s

    async def _close(self) -> None:
        """Give an end to the decisions whose end no scheduler saw, except for the action's."""
        parts = self._parts
        await parts.decisions.refresh()
        action = parts.actions.action
        for decision in parts.decisions.recent_scaling(_RECENT):
            if not decision.adopted or decision.seconds is not None or decision.failure:
                continue
            if action is None or decision.decision_id != action.decision_id:
                await parts.decisions.note_scaling(replace(decision, failure=LOST))
            elif action.ended:
                await self._note_end(action)

    async def _carry_out(self) -> None:
        """Have the action done, until it is, or for as long as the mode is auto; note its end once."""
        parts, action = self._parts, self._parts.actions.action
        now = self.shape
        for side in ("attention", "experts"):
            _active.labels(side).set(getattr(now, side))
            _wanted.labels(side).set(getattr(action.shape if action else now, side))
        if action is None:
            return
        if not action.ended:
            age_s = max(0.0, self._wall_clock() - action.at)
            if is_there(action.shape, parts.fleet, parts.view.current):
                await self._note_end(await parts.actions.end(seconds=round(age_s, 3)))
                self._troubles.pop("carry out", None)
                return
            if age_s > (most_s := PATIENCE_S + longest_load_s(parts.fleet)):
                failure = self._troubles.get("carry out") or f"{now} after {most_s:.0f} s"
                await self._note_end(await parts.actions.end(failure=failure))
        if not action.ended or parts.policy.current.mode == "auto":
            try:
                self._require_room(action.shape)
                await parts.actuator.apply(action.shape)
                self._troubles.pop("carry out", None)
            except MoesaicError as error:
                self._note_trouble("carry out", error)

    def _require_room(self, shape: FleetShape) -> None:
        """Refuse an action that was written when there were fewer experts, or larger workers."""
        fewest = fewest_expert_workers(self._parts.fleet.workers.values())
        if shape.experts < fewest:
            raise NotReady(f"{shape} is wanted, but {fewest} expert workers are needed")

    async def _note_end(self, action: ScalingAction) -> None:
        decision = self._parts.decisions.scaling(action.decision_id)
        if decision is not None:
            ended = replace(decision, seconds=action.seconds, failure=action.failure)
            await self._parts.decisions.note_scaling(ended)

    async def _choose(self, policy: ScalingPolicy) -> Chosen:
        state = await self._state(policy)
        return policy, state, await self._parts.predictor.choose(policy, state)

    async def _decide(
        self, policy: ScalingPolicy, state: ScalingState, choice: ScalingChoice | None
    ) -> None:
        """Log what was chosen, and adopt it if the policy says so."""
        parts = self._parts
        if parts.policy.current != policy or parts.actions.action != state.action:
            # An operator was faster.
            return
        if choice is None:
            self._told = ()
            return
        adopted = policy.mode == "auto" and choice.allowed
        told = (choice.cause, choice.wanted, bool(choice.held), state.shape, policy.mode)
        if not adopted and told == self._told:
            # It was said, and nothing has changed.
            return
        self._told = () if adopted else told
        reason = "; ".join(filter(None, (choice.reason, choice.held)))
        mode = self._parts.brownout.current.mode
        helps = mode == "auto" or (mode == "manual" and min(state.thresholds) < 1)
        if choice.bridged and not helps:
            reason += f"; {NO_BRIDGE}"
        decision = self._decision(
            cause=choice.cause,
            adopted=adopted,
            reason=reason,
            before=state.shape,
            wanted=choice.wanted,
            requests_per_s=round(state.demand.requests_per_s, 4),
            forecast_before=choice.forecast_before,
            forecast=choice.forecast,
            measured_attainment=state.attainment,
            measured_ttft_p90_s=state.ttft_p90_s,
            measured_tpot_p90_s=state.tpot_p90_s,
            prefill_threshold=state.thresholds[0],
            decode_threshold=state.thresholds[1],
            bridged=choice.bridged and helps,
        )
        if adopted:
            await self._adopt(decision)
        else:
            await self._parts.decisions.note_scaling(decision)

    async def _adopt(self, decision: ScalingDecision) -> None:
        """Log a decision, then make it the action in force; the next look carries it out."""
        parts = self._parts
        await parts.decisions.note_scaling(decision)
        try:
            overtaken = await parts.actions.want(
                decision.wanted, decision.before, decision.decision_id
            )
        except PeerLost:  # it may have been written: the next look sees it
            self._closed = False
            raise
        except MoesaicError as error:
            await parts.decisions.note_scaling(replace(decision, failure=str(error)))
            raise
        if overtaken is not None:
            await self._note_end(replace(overtaken, failure=OVERTAKEN))

    async def _state(self, policy: ScalingPolicy) -> ScalingState:
        parts = self._parts
        brownout = parts.brownout.current
        objectives = objectives_of(policy, brownout)
        action, workers = parts.actions.action, parts.fleet.workers
        # Requests that came late before the last action's workers were there shall not bring more of them.
        since_s = (
            action.at + (action.seconds or 0.0)
            if action is not None and action.ended
            else -math.inf
        )
        intended = None
        if action is None or policy.mode != "auto":
            intended = await parts.actuator.intended()
        bounds = await self._bounds(policy)
        measured = parts.feed.measured(policy.window_s, objectives, workers, since_s)
        decisions = parts.decisions.recent_brownout(_RECENT)
        return ScalingState(
            now_s=self._wall_clock(),
            shape=self.shape,
            action=action,
            bounds=bounds,
            demand=parts.predictor.demand(policy),
            objectives=objectives,
            attainment=measured.attainment,
            ttft_p90_s=measured.ttft_p90_s,
            tpot_p90_s=measured.tpot_p90_s,
            waiting=measured.waiting,
            thresholds=thresholds_now(brownout, decisions, workers),
            heard=parts.feed.heard(active_attention(parts.fleet)),
            intended=intended,
        )

    async def _bounds(self, policy: ScalingPolicy) -> ShapeBounds:
        most = await self._parts.actuator.most()
        return shape_bounds(policy, most, self._parts.fleet.workers.values())

    def _decision(self, **fields: Any) -> ScalingDecision:
        return ScalingDecision(decision_id=uuid.uuid4().hex, at=self._wall_clock(), **fields)

    def _note_trouble(self, step: _Step, error: Exception) -> None:
        cause = str(error) or repr(error)
        if cause != self._troubles.get(step):
            self._troubles[step] = cause
            log.warning("scaling.trouble", cause=cause)
