"""Seconds that rows of one layer are on their way to experts and back, by way and shape (JANUS section 3.2).

Transfers are counted by the device that sends or receives most of them. The costs of a start, a message and a byte come
from the performance model.
"""

from dataclasses import dataclass

from moesaic.messages.performance import PerformanceModel
from moesaic.messages.scaling import FleetShape


@dataclass(frozen=True)
class Crossing:
    """Links of one fleet, and the bytes of a row."""

    model: PerformanceModel
    row_bytes: int
    devices_per_node: int

    def direct_s(self, rows: float, shape: FleetShape) -> float:
        """Send from every attention worker to every expert worker, and back: the strawman of the paper."""
        m, n = shape.attention, shape.experts
        busiest_bytes = max(n / m, 1.0) * rows * self.row_bytes
        return 2 * self._inter(max(m, n), busiest_bytes)

    def two_phase_s(self, rows: float, shape: FleetShape) -> float:
        """Bring the rows of a node together first; then the better of both ways of the paper.

        Args:
            rows: of one attention node.
            shape: workers of this node, and of the other side.
        """
        m, n = shape.attention, shape.experts
        nodes = -(-n // self.devices_per_node)
        inside = min(n, self.devices_per_node)
        all_bytes = rows * self.row_bytes
        together_s = self._intra(m - 1, all_bytes * (m - 1) / m) if m > 1 else 0.0
        spread_s = self._intra(inside - 1, all_bytes) if inside > 1 else 0.0
        # Expert workers that one attention worker sends to.
        of_each = -(-n // m)
        to_all_s = self._inter(of_each, max(of_each, 1) * all_bytes)
        of_nodes = -(-nodes // m)
        relayed_s = self._inter(of_nodes, of_nodes * all_bytes) + spread_s
        back_s = spread_s + self._inter(max(nodes, of_nodes), all_bytes * max(1.0, nodes / m))
        return together_s + min(to_all_s, relayed_s) + back_s

    def among_s(self, rows: float, devices: int, top_k: int) -> float:
        """Send rows among devices that each have attention and experts, and back.

        Args:
            rows: of all devices.
            devices: of the fleet.
            top_k: experts of a row, on as many devices at most.
        """
        if devices == 1:
            return 0.0
        sent_bytes = rows / devices * min(top_k, devices - 1) * self.row_bytes
        if devices <= self.devices_per_node:
            return 2 * self._intra(devices - 1, sent_bytes)
        # Part that leaves the node.
        outside = (devices - self.devices_per_node) / (devices - 1)
        return 2 * self._inter(devices - 1, outside * sent_bytes)

    def _intra(self, messages: float, num_bytes: float) -> float:
        return self.model.at("link.intra", (1, messages, num_bytes)).seconds

    def _inter(self, messages: float, num_bytes: float) -> float:
        return self.model.at("link.inter", (1, messages, num_bytes)).seconds
