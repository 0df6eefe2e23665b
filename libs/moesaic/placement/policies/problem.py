"""Placement problems, as policies get them: traffic, and slots or memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moesaic.errors import InvalidInput
from moesaic.messages.placement import EMPTY_SLOT
from moesaic.placement.policies.uniform import Slots
from moesaic.placement.traffic.statistics import Floats, LayerTraffic

Statistic = Literal["tokens", "batches"]


@dataclass(frozen=True, kw_only=True)
class PlacementProblem:
    """One placement to be made, for all layers of a model.

    Where every instance has traffic of its own (an edge server), ``demand`` says where rows come from:
    ``demand[n, l, e]`` rows that instance ``n`` routes to expert ``e`` of layer ``l``. Without it all
    instances take all traffic alike.

    Where instances have memory for experts (an edge server), ``memory`` says how many bytes each of
    their devices has. An instance may then hold more experts of one layer than of another.
    """

    traffic: tuple[LayerTraffic, ...]  # one for each layer with experts, in order
    slots: tuple[int, ...]  # per layer, of each instance; with memory: the most of one layer
    statistic: Statistic = "tokens"  # that replicas are counted by
    demand: Floats | None = None  # [N, L, E]
    remote_cost: Floats | None = None  # [N]: cost of a row to another instance; None: 1 each
    nodes: tuple[int, ...] | None = None  # [N]: the node of each instance
    num_groups: int = 1  # groups of experts that are routed to together
    expert_bytes: int = 0  # of one expert's weights
    layer_bytes: tuple[int, ...] | None = None  # of one expert of each layer; None: expert_bytes
    memory: tuple[tuple[int, ...], ...] | None = None  # [N][devices]: bytes for experts
    # What instances hold now, [L][N][slots]; ``optimal`` keeps it where that costs next to nothing.
    held: list[Slots] | None = None

    def __post_init__(self) -> None:
        num_layers = len(self.traffic)
        shape = (len(self.slots), num_layers, self.num_experts)
        if not self.slots or not num_layers or min(self.slots) < 0:
            raise InvalidInput("problem", "needs instances with slots and layers")
        if any(len(layer.tokens) != self.num_experts for layer in self.traffic):
            raise InvalidInput("traffic", "must be of one number of experts in all layers")
        if self.demand is not None and self.demand.shape != shape:
            raise InvalidInput("demand", f"must be {shape}, got {self.demand.shape}")
        if self.nodes is not None and len(self.nodes) != len(self.slots):
            raise InvalidInput("nodes", f"must name a node for each of {len(self.slots)} instances")
        if self.layer_bytes is not None and len(self.layer_bytes) != num_layers:
            raise InvalidInput("layer_bytes", f"must be of {num_layers} layers")
        if self.held is not None and [len(layer) for layer in self.held] != [shape[0]] * num_layers:
            raise InvalidInput("held", f"must be of {num_layers} layers and {shape[0]} instances")
        if self.memory is not None:
            self._check_memory(self.memory)

    def _check_memory(self, memory: tuple[tuple[int, ...], ...]) -> None:
        if len(memory) != self.num_instances:
            raise InvalidInput("memory", f"must be of {self.num_instances} instances")
        if any(size < 0 for devices in memory for size in devices):
            raise InvalidInput("memory", "must not be negative")
        if min(self.sizes) <= 0:
            raise InvalidInput("expert_bytes", "must be above 0 if memory is given")

    @property
    def num_experts(self) -> int:
        """Experts of each layer, E."""
        return len(self.traffic[0].tokens) if self.traffic else 0

    @property
    def num_instances(self) -> int:
        """N."""
        return len(self.slots)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of one expert of each layer, ``[L]``."""
        return self.layer_bytes or (self.expert_bytes,) * len(self.traffic)

    def weights(self, layer_idx: int) -> Floats:
        """The statistic of a layer's experts, ``[E]``, never negative and always finite."""
        layer = self.traffic[layer_idx]
        counts = layer.tokens if self.statistic == "tokens" else layer.active_batches
        return np.nan_to_num(np.clip(counts, 0, 1e15), nan=0.0)

    def demand_of(self, layer_idx: int) -> Floats:
        """Costs of each instance's rows if all its experts were elsewhere, ``[N, E]``."""
        if self.demand is None:
            each = self.traffic[layer_idx].tokens / self.num_instances
            rows = np.broadcast_to(each, (self.num_instances, self.num_experts))
        else:
            rows = self.demand[:, layer_idx]
        cost = np.ones(self.num_instances) if self.remote_cost is None else self.remote_cost
        return np.nan_to_num(np.clip(rows * cost[:, None], 0, 1e15), nan=0.0)


def as_slots(held: NDArray[np.bool_], slots: Sequence[int]) -> Slots:
    """Fill one layer's slots from a table of holders.

    Args:
        held: ``[E, N]``, True where an instance holds an expert.
        slots: of each instance, at least as many as it holds experts. With memory: what the policy
            gave the layer.

    Returns:
        For each instance its experts, ascending, then -1 for each empty slot.
    """
    experts = [np.flatnonzero(column).tolist() for column in held.T]
    return [
        mine + [EMPTY_SLOT] * (int(count) - len(mine))
        for mine, count in zip(experts, slots, strict=True)
    ]
