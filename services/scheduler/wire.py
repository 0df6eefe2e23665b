"""Encoding for the scheduler's answers, and pins back from requests."""

from typing import Any

import numpy as np

from moesaic.cluster.placements import encode_placement
from moesaic.messages.brownout import BrownoutDecision, BrownoutPolicy
from moesaic.messages.decisions import (
    EVERY_LAYER,
    DecisionOutcome,
    Pin,
    PlacementDecision,
)
from moesaic.messages.registry import WorkerRecord
from moesaic.messages.scaling import (
    FleetShape,
    ScalingDecision,
    ScalingForecast,
    ScalingPolicy,
    ScalingWish,
)
from moesaic.services.scheduler.planning.planner import PlacementPlan
from moesaic.services.scheduler.planning.traffic import ModelTraffic
from moesaic.v1 import scheduler_pb2 as pb


def encode_worker(record: WorkerRecord) -> pb.FleetWorker:
    """One registered worker."""
    return pb.FleetWorker(
        worker_id=record.worker_id,
        generation=record.generation,
        role=record.role,
        state=record.state,
        admin_address=record.admin_address,
        data_address=record.data_address,
        slots_per_layer=record.slots_per_layer,
        model_digest=record.model_digest,
        node=record.node,
    )


def encode_plan(plan: PlacementPlan) -> pb.Plan:
    """A plan; unknown fields are absent."""
    return pb.Plan(
        placement=encode_placement(plan.placement),
        base_epoch=plan.base_epoch,
        policy=plan.policy,
        moves=[
            pb.Move(layer=move.layer, expert=move.expert, worker_id=move.worker_id)
            for move in plan.moves
        ],
        moved_bytes=plan.moved_bytes,
        activated_before=plan.before,
        activated_after=plan.after,
        seconds=plan.seconds,
        worthwhile=plan.worthwhile,
        reason=plan.reason,
        batches=plan.batches,
        sampled_batches=plan.sampled_batches,
        local_share_before=plan.local_share_before,
        local_share_after=plan.local_share_after,
        row_s_before=plan.row_s_before,
        row_s_after=plan.row_s_after,
    )


def encode_decision(decision: PlacementDecision, outcome: DecisionOutcome | None) -> pb.Decision:
    """A decision with its outcome; unknown fields are absent."""
    return pb.Decision(
        decision_id=decision.decision_id,
        at=decision.at,
        cause=decision.cause,
        adopted=decision.adopted,
        reason=decision.reason,
        policy=decision.policy,
        epoch_before=decision.epoch_before,
        moves=decision.moves,
        moved_bytes=decision.moved_bytes,
        batches=decision.batches,
        sampled_batches=decision.sampled_batches,
        predicted_before=decision.predicted_before,
        predicted_after=decision.predicted_after,
        predicted_seconds=decision.predicted_s,
        epoch=outcome.epoch if outcome else 0,
        seconds=outcome.seconds if outcome else None,
        failure=outcome.failure if outcome else "",
        measured_after=outcome.measured_after if outcome else None,
        measured_batches=outcome.measured_batches if outcome else 0,
        local_share_before=decision.local_share_before,
        local_share_after=decision.local_share_after,
        row_s_before=decision.row_s_before,
        row_s_after=decision.row_s_after,
        measured_local_share=outcome.measured_local_share if outcome else None,
        measured_row_s=outcome.measured_row_s if outcome else None,
        measured_choices=outcome.measured_choices if outcome else 0,
    )


def encode_pin(pin: Pin) -> pb.Pin:
    """A pin; a pin of every layer names no layer."""
    layer = None if pin.layer == EVERY_LAYER else pin.layer
    return pb.Pin(layer=layer, expert=pin.expert, worker_id=pin.worker_id)


def decode_pin(wire: pb.Pin) -> Pin:
    """A pin from the wire."""
    layer = wire.layer if wire.HasField("layer") else EVERY_LAYER
    return Pin(layer=layer, expert=wire.expert, worker_id=wire.worker_id)


def encode_brownout(policy: BrownoutPolicy) -> pb.BrownoutPolicy:
    """A policy of brownout, with all fields."""
    names = pb.BrownoutPolicy.DESCRIPTOR.fields_by_name
    return pb.BrownoutPolicy(**{name: getattr(policy, name) for name in names})


def decode_brownout(wire: pb.BrownoutPolicy) -> dict[str, Any]:
    """Fields of a policy of brownout that are to change."""
    return {field.name: value for field, value in wire.ListFields()}


def encode_brownout_decision(decision: BrownoutDecision) -> pb.BrownoutDecision:
    """A decision of a worker; unknown fields are absent."""
    inputs = decision.inputs
    fields = {
        name: getattr(inputs if hasattr(inputs, name) else decision, name)
        for name in pb.BrownoutDecision.DESCRIPTOR.fields_by_name
    }
    return pb.BrownoutDecision(**fields)


def encode_shape(shape: FleetShape) -> pb.FleetShape:
    """Numbers of workers."""
    return pb.FleetShape(attention=shape.attention, experts=shape.experts)


def encode_scaling_policy(policy: ScalingPolicy) -> pb.ScalingPolicy:
    """A policy of scaling, with all fields."""
    names = pb.ScalingPolicy.DESCRIPTOR.fields_by_name
    return pb.ScalingPolicy(**{name: getattr(policy, name) for name in names})


def decode_scaling_policy(wire: pb.ScalingPolicy) -> dict[str, Any]:
    """Fields of a policy of scaling that are to change."""
    return {field.name: value for field, value in wire.ListFields()}


def encode_wish(wish: ScalingWish) -> pb.ScalingWish:
    """The last action on numbers of workers; unknown fields are absent."""
    fields = {name: getattr(wish, name) for name in pb.ScalingWish.DESCRIPTOR.fields_by_name}
    return pb.ScalingWish(**{**fields, "shape": encode_shape(wish.shape)})


def encode_scaling_decision(decision: ScalingDecision) -> pb.ScalingDecision:
    """A decision about numbers of workers; unknown fields are absent."""
    names = pb.ScalingDecision.DESCRIPTOR.fields_by_name
    fields = {name: getattr(decision, name) for name in names}
    for name in ("before", "wanted"):
        fields[name] = encode_shape(fields[name])
    for name in ("forecast_before", "forecast"):
        fields[name] = fields[name] and _encode_forecast(fields[name])
    return pb.ScalingDecision(**fields)


def _encode_forecast(forecast: ScalingForecast) -> pb.ScalingForecast:
    names = pb.ScalingForecast.DESCRIPTOR.fields_by_name
    fields = {name: getattr(forecast, name) for name in names}
    return pb.ScalingForecast(**{**fields, "shape": encode_shape(forecast.shape)})


def encode_traffic(traffic: ModelTraffic) -> list[pb.LayerActivations]:
    """A model's traffic, layer by layer."""
    return [
        pb.LayerActivations(
            layer=layer,
            batches=seen.batches,
            tokens=np.round(seen.tokens, 3).tolist(),
            active=np.round(seen.active_batches, 3).tolist(),
        )
        for layer, seen in sorted(traffic.statistics.layers.items())
    ]
