"""Tokens a second and device at a fixed number of requests, all of them decoding (JANUS section 5.3, figure 7)."""

from dataclasses import dataclass
from typing import Literal

from moesaic.messages.scaling import FleetShape
from moesaic.scaling.contract import StepRows
from moesaic_lab.simulation.elastic.steady import StudiedFleet

Aim = Literal["devices", "throughput"]
"""``devices``: as few as meet the target. ``throughput``: most tokens a second and device that meet it, as the paper
says. Among equals the shorter step wins."""


@dataclass(frozen=True)
class BatchFigure:
    """One fleet at one batch.

    Attributes:
        shape: that was chosen.
        tpot_s: seconds of a step.
        per_device: tokens a second and device.
        met: the target was met; else the shape is the fastest there is.
    """

    shape: FleetShape
    tpot_s: float
    per_device: float
    met: bool


def batch_figure(
    fleet: StudiedFleet,
    batch: int,
    context_tokens: float,
    slo_tpot_s: float,
    aim: Aim = "devices",
    most: int = 64,
) -> BatchFigure:
    """Choose a shape for so many requests.

    Args:
        fleet: the way to serve.
        batch: requests, on all attention workers together.
        context_tokens: of one request, on the mean.
        slo_tpot_s: target.
        aim: of the choice.
        most: devices.
    """
    found = [
        at_shape(fleet, shape, batch, context_tokens, slo_tpot_s)
        for shape in fleet.shapes_up_to(most)
        if fleet.times.holds(shape)
        and -(-batch // shape.attention) * context_tokens <= fleet.times.limits(shape).kv_tokens
    ]
    meeting = [figure for figure in found if figure.met]
    if not meeting:
        return min(found, key=lambda figure: figure.tpot_s)
    if aim == "devices":
        return min(meeting, key=lambda figure: (figure.shape.total, figure.tpot_s))
    return max(meeting, key=lambda figure: (figure.per_device, -figure.tpot_s))


def at_shape(
    fleet: StudiedFleet, shape: FleetShape, batch: int, context_tokens: float, slo_tpot_s: float
) -> BatchFigure:
    """Predict one shape; requests are spread evenly over attention workers."""
    own = batch / shape.attention
    step_s = fleet.times.step(StepRows(0.0, own, own * context_tokens), shape).seconds
    return BatchFigure(shape, step_s, batch / step_s / shape.total, step_s <= slo_tpot_s)
