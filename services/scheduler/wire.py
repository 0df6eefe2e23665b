"""Encoding for the scheduler's answers, and pins back from requests."""

import numpy as np

from moesaic.cluster.placements import encode_placement
from moesaic.cluster.wire import filled
from moesaic.messages.brownout import BrownoutDecision
from moesaic.messages.decisions import (
    EVERY_LAYER,
    DecisionOutcome,
    Pin,
    PlacementDecision,
)
from moesaic.messages.scaling import (
    FleetShape,
    ScalingAction,
    ScalingDecision,
    ScalingForecast,
)
from moesaic.services.scheduler.planning.planner import PlacementPlan
from moesaic.services.scheduler.planning.traffic import ModelTraffic
from moesaic.v1 import scheduler_pb2 as pb

_NO_OUTCOME = DecisionOutcome(decision_id="")


def encode_plan(plan: PlacementPlan) -> pb.Plan:
    """A plan; unknown fields are absent."""
    return filled(
        pb.Plan,
        plan,
        placement=encode_placement(plan.placement),
        moves=[filled(pb.Move, move) for move in plan.moves],
        activated_before=plan.before,
        activated_after=plan.after,
    )


def encode_decision(decision: PlacementDecision, outcome: DecisionOutcome | None) -> pb.Decision:
    """A decision with its outcome; unknown fields are absent."""
    return filled(
        pb.Decision, decision, outcome or _NO_OUTCOME, predicted_seconds=decision.predicted_s
    )


def encode_pin(pin: Pin) -> pb.Pin:
    """A pin; a pin of every layer names no layer."""
    return filled(pb.Pin, pin, layer=None if pin.layer == EVERY_LAYER else pin.layer)


def decode_pin(wire: pb.Pin) -> Pin:
    """A pin from the wire."""
    layer = wire.layer if wire.HasField("layer") else EVERY_LAYER
    return Pin(layer=layer, expert=wire.expert, worker_id=wire.worker_id)


def encode_brownout_decision(decision: BrownoutDecision) -> pb.BrownoutDecision:
    """A decision of a worker; unknown fields are absent."""
    return filled(pb.BrownoutDecision, decision.inputs, decision)


def encode_shape(shape: FleetShape) -> pb.FleetShape:
    """Numbers of workers."""
    return filled(pb.FleetShape, shape)


def encode_action(action: ScalingAction) -> pb.ScalingAction:
    """The last action on numbers of workers; unknown fields are absent."""
    return filled(pb.ScalingAction, action, shape=encode_shape(action.shape))


def encode_scaling_decision(decision: ScalingDecision) -> pb.ScalingDecision:
    """A decision about numbers of workers; unknown fields are absent."""
    return filled(
        pb.ScalingDecision,
        decision,
        before=encode_shape(decision.before),
        wanted=encode_shape(decision.wanted),
        forecast_before=_encode_forecast(decision.forecast_before),
        forecast=_encode_forecast(decision.forecast),
    )


def _encode_forecast(forecast: ScalingForecast | None) -> pb.ScalingForecast | None:
    if forecast is None:
        return None
    return filled(pb.ScalingForecast, forecast, shape=encode_shape(forecast.shape))


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
