"""SchedulerService: wire -> domain -> wire."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from msgspec.structs import replace

from moesaic.cluster.placement_view import PlacementView
from moesaic.cluster.placements import decode_placement, encode_placement
from moesaic.cluster.registry import Fleet
from moesaic.cluster.rpc.statuses import errors_as_status
from moesaic.cluster.wire import changes_of, filled
from moesaic.errors import InvalidInput, NotReady, StaleEpoch
from moesaic.messages.brownout import BrownoutPolicy
from moesaic.messages.decisions import EVERY_LAYER, Pin, PlacementPolicy
from moesaic.messages.placement import PlacedWorker, Placement
from moesaic.messages.scaling import FleetShape, ScalingPolicy
from moesaic.placement.policies import require_policy
from moesaic.services.scheduler.log import DecisionLog
from moesaic.services.scheduler.loop import PlacementLoop
from moesaic.services.scheduler.planning.traffic import TrafficFeed
from moesaic.services.scheduler.scaling.actions import ActionStore
from moesaic.services.scheduler.scaling.controller import ScalingController
from moesaic.services.scheduler.versioned import VersionedStore
from moesaic.services.scheduler.wire import (
    decode_pin,
    encode_action,
    encode_brownout_decision,
    encode_decision,
    encode_pin,
    encode_plan,
    encode_scaling_decision,
    encode_shape,
    encode_traffic,
)
from moesaic.v1 import placement_pb2, scheduler_pb2_grpc
from moesaic.v1 import scheduler_pb2 as pb

_T = TypeVar("_T")
_Context = grpc.aio.ServicerContext[Any, Any]
_USUAL_DECISIONS, _MOST_DECISIONS = 20, 1000


@dataclass(frozen=True)
class Parts:
    """Parts of the scheduler that answers are made from."""

    fleet: Fleet
    view: PlacementView
    loop: PlacementLoop
    policies: VersionedStore[PlacementPolicy]
    decisions: DecisionLog
    feed: TrafficFeed
    brownout: VersionedStore[BrownoutPolicy]
    scaling_policy: VersionedStore[ScalingPolicy]
    actions: ActionStore
    scaling: ScalingController


class SchedulerAdmin(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Answers from the parts of the scheduler; before ``open`` there are none."""

    def __init__(self) -> None:
        self._parts: Parts | None = None
        self._orders: set[asyncio.Task[Any]] = (
            set()
        )  # kept until they end, also without their caller
        self._planning = asyncio.Lock()  # each plan has a process: one at a time

    def open(self, parts: Parts) -> None:
        """Answer from these from now on."""
        self._parts = parts

    async def GetPlacement(
        self, request: pb.GetPlacementRequest, context: _Context
    ) -> pb.GetPlacementResponse:
        """Answer with the committed placement; NOT_FOUND while there is none."""
        async with errors_as_status(context):
            parts = self._opened()
            if parts.view.current is None:
                text = "; ".join(["no placement is committed yet", *parts.loop.waiting_for])
                await context.abort(grpc.StatusCode.NOT_FOUND, text)
            return pb.GetPlacementResponse(placement=encode_placement(parts.view.current))

    async def WatchPlacement(
        self, request: pb.WatchPlacementRequest, context: _Context
    ) -> AsyncIterator[pb.WatchPlacementResponse]:
        """Stream the committed placement and later ones; a slow reader may miss all but the last."""
        async with errors_as_status(context):
            view = self._opened().view
            while True:
                seen = view.version
                if view.current is not None:
                    yield pb.WatchPlacementResponse(placement=encode_placement(view.current))
                await view.changed(seen)

    async def GetFleet(self, request: pb.GetFleetRequest, context: _Context) -> pb.GetFleetResponse:
        """List every registered worker, by role and id."""
        async with errors_as_status(context):
            parts = self._opened()
            records = sorted(parts.fleet.workers.values(), key=lambda r: (r.role, r.worker_id))
            return pb.GetFleetResponse(
                workers=[filled(pb.FleetWorker, record) for record in records],
                waiting_for=parts.loop.waiting_for,
            )

    async def Plan(self, request: pb.PlanRequest, context: _Context) -> pb.PlanResponse:
        """Plan by a policy; nothing changes."""
        async with errors_as_status(context), self._planning:
            parts, current = self._opened(), self._placed()
            policy = require_policy(request.policy or parts.policies.current.policy)
            # Others do not see the traffic.
            parts.loop.require_lead()
            plan = await parts.loop.plan(current, policy)
            return pb.PlanResponse(plan=encode_plan(plan))

    async def ApplyPlacement(
        self, request: pb.ApplyPlacementRequest, context: _Context
    ) -> pb.ApplyPlacementResponse:
        """Make an operator's placement the one in force; this continues if the caller leaves."""
        async with errors_as_status(context):
            parts, current = self._opened(), self._placed()
            if request.base_epoch != current.epoch:
                raise StaleEpoch(request.base_epoch, current.epoch)
            wanted = _completed(_decoded(request.placement), parts.fleet)
            decision = await self._finished(parts.loop.apply(wanted, request.base_epoch))
            return pb.ApplyPlacementResponse(
                epoch=parts.view.epoch, decision_id=decision.decision_id if decision else ""
            )

    async def SetPolicy(
        self, request: pb.SchedulerServiceSetPolicyRequest, context: _Context
    ) -> pb.SchedulerServiceSetPolicyResponse:
        """Change the policy, or pins, or both; repeating it changes nothing."""
        async with errors_as_status(context):
            parts = self._opened()
            parts.loop.require_lead()
            if request.policy:
                require_policy(request.policy)
            added = [_checked(decode_pin(pin), parts.view.current) for pin in request.add_pins]
            removed = [decode_pin(pin) for pin in request.remove_pins]

            def edited(before: PlacementPolicy) -> PlacementPolicy:
                pins = [pin for pin in before.pins if pin not in removed]
                pins += [pin for pin in dict.fromkeys(added) if pin not in pins]
                return PlacementPolicy(policy=request.policy or before.policy, pins=pins)

            after = await parts.policies.change(edited)
            return pb.SchedulerServiceSetPolicyResponse(
                policy=after.policy, pins=[encode_pin(pin) for pin in after.pins]
            )

    async def GetDecisions(
        self, request: pb.GetDecisionsRequest, context: _Context
    ) -> pb.GetDecisionsResponse:
        """List the last decisions, newest first, with the policy and the pins."""
        async with errors_as_status(context):
            parts = self._opened()
            # A standby has not made them.
            await parts.decisions.refresh()
            await parts.policies.look()
            count = min(request.limit or _USUAL_DECISIONS, _MOST_DECISIONS)
            policy = parts.policies.current
            return pb.GetDecisionsResponse(
                decisions=[encode_decision(*entry) for entry in parts.decisions.recent(count)],
                policy=policy.policy,
                pins=[encode_pin(pin) for pin in policy.pins],
            )

    async def SetBrownout(
        self, request: pb.SetBrownoutRequest, context: _Context
    ) -> pb.SetBrownoutResponse:
        """Change the policy of brownout; repeating it changes nothing."""
        async with errors_as_status(context):
            parts = self._opened()
            parts.loop.require_lead()
            changes = changes_of(request.policy)
            after = await parts.brownout.change(lambda before: replace(before, **changes).checked())
            return pb.SetBrownoutResponse(policy=filled(pb.BrownoutPolicy, after))

    async def GetBrownout(
        self, request: pb.GetBrownoutRequest, context: _Context
    ) -> pb.GetBrownoutResponse:
        """Tell the policy of brownout, and the last decisions of workers, newest first."""
        async with errors_as_status(context):
            parts = self._opened()
            await parts.decisions.refresh()
            await parts.brownout.look()
            count = min(request.limit or _USUAL_DECISIONS, _MOST_DECISIONS)
            return pb.GetBrownoutResponse(
                policy=filled(pb.BrownoutPolicy, parts.brownout.current),
                decisions=map(encode_brownout_decision, parts.decisions.recent_brownout(count)),
            )

    async def Scale(self, request: pb.ScaleRequest, context: _Context) -> pb.ScaleResponse:
        """Order a shape; the policy no longer changes it, unless the request says so.

        This continues if the caller leaves.
        """
        async with errors_as_status(context):
            parts = self._opened()
            parts.loop.require_lead()
            wanted = FleetShape(request.shape.attention, request.shape.experts)
            reason = f"an operator wants {wanted}"
            decision_id = await self._finished(
                parts.scaling.order(wanted, reason, keep_mode=request.keep_mode)
            )
            return pb.ScaleResponse(decision_id=decision_id, mode=parts.scaling_policy.current.mode)

    async def SetScaling(
        self, request: pb.SetScalingRequest, context: _Context
    ) -> pb.SetScalingResponse:
        """Change the policy of scaling; repeating it changes nothing."""
        async with errors_as_status(context):
            parts = self._opened()
            parts.loop.require_lead()
            changes = changes_of(request.policy)
            after = await parts.scaling_policy.change(
                lambda before: replace(before, **changes).checked()
            )
            return pb.SetScalingResponse(policy=filled(pb.ScalingPolicy, after))

    async def GetScaling(
        self, request: pb.GetScalingRequest, context: _Context
    ) -> pb.GetScalingResponse:
        """Tell the policy of scaling, what is and what is wanted, and the last decisions, newest first."""
        async with errors_as_status(context):
            parts = self._opened()
            await parts.decisions.refresh()
            await parts.scaling_policy.look()
            await parts.actions.look()
            count = min(request.limit or _USUAL_DECISIONS, _MOST_DECISIONS)
            action, scaling = parts.actions.action, parts.scaling
            bounds, trouble = await scaling.bounds()
            return pb.GetScalingResponse(
                policy=filled(pb.ScalingPolicy, parts.scaling_policy.current),
                actuator=scaling.actuator,
                shape=encode_shape(scaling.shape),
                least=encode_shape(bounds.least) if bounds else None,
                most=encode_shape(bounds.most) if bounds else None,
                action=encode_action(action) if action else None,
                trouble=trouble,
                decisions=map(encode_scaling_decision, parts.decisions.recent_scaling(count)),
            )

    async def GetActivations(
        self, request: pb.SchedulerServiceGetActivationsRequest, context: _Context
    ) -> pb.SchedulerServiceGetActivationsResponse:
        """Answer with the traffic of the model that is placed, older batches counting less."""
        async with errors_as_status(context):
            parts, current = self._opened(), self._placed()
            traffic = parts.feed.of(current.model_digest)
            return pb.SchedulerServiceGetActivationsResponse(
                model_digest=current.model_digest,
                layers=encode_traffic(traffic) if traffic else [],
                windows=traffic.windows if traffic else 0,
                refused=parts.feed.refused,
            )

    async def _finished(self, order: Coroutine[Any, Any, _T]) -> _T:
        """Await an order that continues if the caller leaves."""
        task = asyncio.create_task(order)
        self._orders.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, order: "asyncio.Task[Any]") -> None:
        self._orders.discard(order)
        if not order.cancelled():
            # The log of decisions has it, if the caller has gone.
            order.exception()

    def _opened(self) -> Parts:
        if self._parts is None:
            raise NotReady("the scheduler is still waiting for Redis")
        return self._parts

    def _placed(self) -> Placement:
        current = self._opened().view.current
        if current is None:
            raise NotReady("no placement is committed yet")
        return current


def _decoded(wire: placement_pb2.Placement) -> Placement:
    whole = placement_pb2.Placement()
    whole.CopyFrom(wire)
    whole.epoch = max(1, whole.epoch)  # plans have none yet
    return replace(decode_placement(whole), epoch=0)


def _completed(wanted: Placement, fleet: Fleet) -> Placement:
    """Fill in the workers as they are registered now: a caller need only know their ids.

    Raises:
        InvalidInput: one of them is not registered.
    """
    placed = []
    for worker in wanted.workers:
        record = fleet.workers.get(worker.worker_id)
        if record is None or not record.holds_experts:
            raise InvalidInput("placement.workers", f"no expert worker {worker.worker_id!r} here")
        placed.append(PlacedWorker.of(record))
    return replace(wanted, workers=placed)


def _checked(pin: Pin, current: Placement | None) -> Pin:
    if current is not None:
        if pin.expert >= current.num_own:
            raise InvalidInput("pin.expert", f"must be below {current.num_own}")
        if pin.layer not in (EVERY_LAYER, *current.layers):
            raise InvalidInput("pin.layer", f"must be one of {current.layers}")
    return pin
