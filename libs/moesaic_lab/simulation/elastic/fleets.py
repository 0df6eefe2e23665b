"""Ways to serve one model on one kind of device, to be compared: ours with its parts on and off, and others."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesaic.brownout.split import Layer, Level, split_choices
from moesaic.errors import InvalidInput
from moesaic.messages.performance import PartCost, PerformanceModel
from moesaic.messages.substitution import Substitution
from moesaic_lab.placement.activated import ActivatedExperts, Keep, ReplicaChoice
from moesaic_lab.placement.drawn_routing import draw_layers
from moesaic_lab.simulation.elastic.fleet_times import ApartTimes, Hardware, TogetherTimes, Way
from moesaic_lab.simulation.elastic.steady import StudiedFleet

ROUTED_LAYERS = 2  # of drawn routing
ROUTED_ROWS = 2048  # of each
FIXED_SIZES = (16, 32, 64)  # of the paper's monolith
MOST_TOGETHER = 256  # devices of a monolith of any size
COARSE = 8  # workers that a coarse fleet adds at once
MOST_ATTENTION_SHARE = 0.9  # of a device: the rest is for KV


@dataclass(frozen=True)
class FleetFamily:
    """All ways to serve one model.

    Attributes:
        hardware: devices, model and costs.
        routing: of some layers the experts of rows, int ``[rows, k]`` each; recorded or drawn.
        seed: of batches.
    """

    hardware: Hardware
    routing: Sequence[NDArray[Any]]
    seed: int = 0

    @classmethod
    def drawn(cls, hardware: Hardware, seed: int = 0) -> "FleetFamily":
        """Draw routing, where none was recorded.

        Raises:
            InvalidInput: an attention worker's weights do not fit on the device, or no expert does.
        """
        model, device = hardware.model, hardware.device
        if model.attention_bytes > MOST_ATTENTION_SHARE * device.usable_bytes:
            raise InvalidInput(
                "device",
                f"must hold the {model.attention_bytes / 1e9:.0f} GB of attention weights of "
                f"{model.title}, {device.title} has {device.usable_bytes / 1e9:.0f} GB for them",
            )
        if model.slot_bytes > device.usable_bytes:
            raise InvalidInput("device", "must hold at least one expert of every layer")
        layers = draw_layers(ROUTED_LAYERS, ROUTED_ROWS, model.num_experts, model.top_k, seed)
        return cls(hardware, layers, seed)

    @cached_property
    def ours(self) -> StudiedFleet:
        """Both sides scaled on their own, replicas chosen by AEBS."""
        return self._apart("ours", "aebs")

    @cached_property
    def unbalanced(self) -> StudiedFleet:
        """Ours with replicas drawn by chance instead of AEBS."""
        return self._apart("without AEBS", "random")

    @cached_property
    def unreplicated(self) -> StudiedFleet:
        """Ours with each expert in one place."""
        return self._apart("without replicas", "single")

    @cached_property
    def direct(self) -> StudiedFleet:
        """Ours with rows sent to every expert worker from every attention worker."""
        return self._apart("direct", "aebs", way="direct")

    def browned_out(self, threshold: float) -> StudiedFleet:
        """Ours under brownout: of a batch's choices so large a share keeps its experts, the others fall away.

        The split is that of the suite, with the substitution ``fewer``; all weights of a row count alike here.
        """
        return self._apart(
            f"brownout, threshold {threshold:g}", "aebs", _fewer(threshold, self.hardware)
        )

    @cached_property
    def coarse(self) -> StudiedFleet:
        """Both sides apart, in units of eight workers, replicas drawn by chance: the paper's DisAgg."""
        return self._apart("coarse", "random", unit=COARSE)

    @cached_property
    def fixed_sizes(self) -> StudiedFleet:
        """One instance of 16, 32 or 64 devices: the paper's monolith."""
        return StudiedFleet("16, 32 or 64 together", self._together, sizes=FIXED_SIZES)

    @cached_property
    def any_size(self) -> StudiedFleet:
        """One instance of as many devices as one likes, from those that just hold the model."""
        sizes = tuple(range(self._together.least.attention, MOST_TOGETHER + 1))
        return StudiedFleet("any number together", self._together, sizes=sizes)

    @cached_property
    def _together(self) -> TogetherTimes:
        return TogetherTimes(self.hardware, self._activated("single"))

    def _apart(
        self,
        name: str,
        choice: ReplicaChoice,
        keep: Keep | None = None,
        unit: int = 1,
        way: Way = "chosen",
    ) -> StudiedFleet:
        times = ApartTimes(self.hardware, self._activated(choice, keep), way)
        return StudiedFleet(name, times, unit)

    def _activated(self, choice: ReplicaChoice, keep: Keep | None = None) -> ActivatedExperts:
        return ActivatedExperts(
            self.routing, self.hardware.model.num_experts, choice, self.seed, keep
        )


def _fewer(threshold: float, hardware: Hardware) -> Keep:
    """Split choices as workers do, on the substitution that leaves out what is degraded."""
    layer = Layer(hardware.model.num_experts, Substitution(instead="fewer"))

    def keep(topk_ids: NDArray[Any]) -> NDArray[Any]:
        ids = topk_ids.astype(np.int32)
        weights = np.full(ids.shape, 1 / ids.shape[1], np.float32)
        rows = np.zeros(len(ids), np.uint8)
        return split_choices(ids, weights, [Level(threshold)], rows, layer).ids

    return keep


def slowed(performance: PerformanceModel, factor: float) -> PerformanceModel:
    """Have every part take ``factor`` times as long."""
    parts = {
        part: PartCost(terms=cost.terms, unit_s=tuple(factor * each for each in cost.unit_s))
        for part, cost in performance.parts.items()
    }
    return PerformanceModel(device=performance.device, source=performance.source, parts=parts)
