"""Seconds of steps, and limits of memory, of two kinds of fleets: attention and experts apart, or all in one instance.

Both follow the performance model and the activated experts to be expected; they differ in what they may choose.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

from moesaic.messages.performance import PerformanceModel
from moesaic.messages.scaling import FleetShape
from moesaic.scaling.contract import ServingLimits, StepRows, StepTime, StepTimes
from moesaic.scaling.serving_times import time_at_station
from moesaic_lab.placement.activated import ActivatedExperts
from moesaic_lab.simulation.elastic.crossing import Crossing
from moesaic_lab.simulation.elastic.hardware import DeviceProfile
from moesaic_lab.simulation.elastic.model_shapes import ITEM_BYTES, ModelShape

Way = Literal["chosen", "direct"]
"""``direct``: every attention worker sends its rows to every expert worker. ``chosen``: that or two-phase, whichever is
quicker; rows are complete in both, for the gate runs on the expert side."""

MOST_SEQUENCES = 1024  # in one step of one attention worker
MOST_ROWS = 2048  # likewise


class FleetTimes(StepTimes, Protocol):
    """Step times of a fleet, and the shapes whose memory suffices."""

    @property
    def least(self) -> FleetShape:
        """The smallest shape that holds the model, if any does."""
        ...

    def holds(self, shape: FleetShape) -> bool:
        """Tell if the model's weights fit."""
        ...

    def limits(self, shape: FleetShape) -> ServingLimits:
        """Return the limits of one attention worker."""
        ...


@dataclass(frozen=True)
class Hardware:
    """Devices, the model on them, and the seconds of its parts; all that a study needs to know of both."""

    device: DeviceProfile
    model: ModelShape
    performance: PerformanceModel

    @cached_property
    def crossing(self) -> Crossing:
        """Links of the fleet."""
        row_bytes = self.model.hidden * ITEM_BYTES
        return Crossing(self.performance, row_bytes, self.device.devices_per_node)

    def attention_s(self, rows: StepRows) -> float:
        """Predict what an attention worker computes in a step, the head included."""
        amounts = (1, rows.rows, rows.keys, rows.prompt_keys)
        body = self.performance.at("attention", amounts).seconds
        return body + self.performance.at("head", (1, rows.answer_rows)).seconds

    def experts_s(self, activated: float, choices: float) -> float:
        """Predict one layer of one batch on one expert worker."""
        return self.performance.at("experts", (1, activated, choices)).seconds

    def serving(self, kv_bytes: float) -> ServingLimits:
        """Return the limits of a worker with so much memory for KV."""
        kv_tokens = max(0, int(kv_bytes / self.model.kv_token_bytes))
        return ServingLimits(MOST_SEQUENCES, MOST_ROWS, kv_tokens)


def _part(rows: StepRows, parts: int) -> StepRows:
    """Return the rows of one of so many micro-batches."""
    if parts == 1:
        return rows
    return StepRows(
        rows.prompt_rows / parts,
        rows.answer_rows / parts,
        rows.keys / parts,
        rows.prompt_keys / parts,
    )


@dataclass(frozen=True)
class ApartTimes:
    """Attention and expert workers on devices of their own.

    Rows of one attention node are one batch of a layer, or two micro-batches if that is quicker. Nodes do not wait for
    one another: an expert worker computes their batches one after the other, and those that meet there queue.

    Attributes:
        hardware: of both sides.
        activated: experts on the fullest worker.
        way: in which rows reach experts.
    """

    hardware: Hardware
    activated: ActivatedExperts
    way: Way = "chosen"

    @property
    def slots(self) -> int:
        """Experts of a layer that one expert worker has room for."""
        device, model = self.hardware.device, self.hardware.model
        return min(model.num_experts, int(device.usable_bytes / model.slot_bytes))

    @property
    def least(self) -> FleetShape:
        """The smallest shape that holds the model, if any does."""
        return FleetShape(1, -(-self.hardware.model.num_experts // max(1, self.slots)))

    def holds(self, shape: FleetShape) -> bool:
        """Tell if all experts have slots, and attention workers room for KV."""
        enough = shape.experts * self.slots >= self.hardware.model.num_experts
        return enough and self.limits(shape).kv_tokens > 0

    def limits(self, shape: FleetShape) -> ServingLimits:
        """Return the limits of one attention worker, which do not depend on the shape."""
        model, usable = self.hardware.model, self.hardware.device.usable_bytes
        return self.hardware.serving(usable - model.attention_bytes)

    def step(self, rows: StepRows, shape: FleetShape) -> StepTime:
        """Predict one step of one attention worker, the others having alike ones."""
        whole, halves = (self._step(rows, shape, parts) for parts in (1, 2))
        return whole if whole.seconds <= halves.seconds else halves

    def _step(self, rows: StepRows, shape: FleetShape, parts: int) -> StepTime:
        """Predict a step of so many micro-batches: attention of one overlaps experts of the other."""
        hardware, model = self.hardware, self.hardware.model
        own = _part(rows, parts)
        nodes = -(-shape.attention // hardware.device.devices_per_node)
        # Of the fullest node.
        workers = -(-shape.attention // nodes)
        batch = own.rows * workers
        activated = self.activated.largest(shape.experts, self.slots, batch)
        layer_s = hardware.experts_s(activated, batch * model.top_k / shape.experts)
        crossing_s = self._crossing_s(batch, FleetShape(workers, shape.experts))
        attention_s = hardware.attention_s(own)
        elsewhere_s = attention_s / model.num_moe_layers + crossing_s
        there_s = time_at_station(nodes * parts, layer_s, elsewhere_s)
        seconds = attention_s + model.num_moe_layers * (crossing_s + there_s)
        return StepTime(
            max(seconds, parts * attention_s),
            parts * attention_s,
            nodes * parts * model.num_moe_layers * layer_s,
        )

    def _crossing_s(self, batch: float, shape: FleetShape) -> float:
        crossing = self.hardware.crossing
        direct_s = crossing.direct_s(batch, shape)
        return (
            direct_s if self.way == "direct" else min(direct_s, crossing.two_phase_s(batch, shape))
        )


@dataclass(frozen=True)
class TogetherTimes:
    """One instance over all devices: each has all of attention and a part of the experts, without replicas.

    Shapes have devices as attention workers, and no expert workers.

    Attributes:
        hardware: of the devices.
        activated: experts on the fullest device; each expert in one place.
    """

    hardware: Hardware
    activated: ActivatedExperts

    @property
    def least(self) -> FleetShape:
        """The smallest shape that holds the model."""
        most = self.hardware.model.num_experts
        return next(
            (shape for n in range(1, most) if self.holds(shape := FleetShape(n, 0))),
            FleetShape(most, 0),
        )

    def holds(self, shape: FleetShape) -> bool:
        """Tell if weights fit, with room for some KV."""
        return self.limits(shape).kv_tokens >= MOST_ROWS

    def limits(self, shape: FleetShape) -> ServingLimits:
        """Return the limits of one device."""
        model = self.hardware.model
        weights = model.attention_bytes + self._slots(shape) * model.slot_bytes
        return self.hardware.serving(self.hardware.device.usable_bytes - weights)

    def step(self, rows: StepRows, shape: FleetShape) -> StepTime:
        """Predict one step of all devices, which go through it together."""
        whole, halves = (self._step(rows, shape, parts) for parts in (1, 2))
        return whole if whole.seconds <= halves.seconds else halves

    def _step(self, rows: StepRows, shape: FleetShape, parts: int) -> StepTime:
        """Predict a step of so many micro-batches: transfers of one overlap what the other computes."""
        hardware, model, devices = self.hardware, self.hardware.model, shape.attention
        own = _part(rows, parts)
        batch = own.rows * devices
        activated = self.activated.largest(devices, self._slots(shape), batch)
        layer_s = hardware.experts_s(activated, batch * model.top_k / devices)
        crossing_s = hardware.crossing.among_s(batch, devices, model.top_k)
        attention_s, experts_s = hardware.attention_s(own), model.num_moe_layers * layer_s
        computed_s, crossed_s = attention_s + experts_s, model.num_moe_layers * crossing_s
        seconds = max(computed_s + crossed_s, parts * max(computed_s, crossed_s))
        return StepTime(seconds, parts * attention_s, parts * experts_s)

    def _slots(self, shape: FleetShape) -> int:
        return -(-self.hardware.model.num_experts // shape.attention)
