"""Finds the step whose computing hides the transfers: times in, a size out. Pure."""

from dataclasses import dataclass

from moesaic.messages.performance import PartCost
from moesaic.prefix.flops import saturation_flops


@dataclass(frozen=True)
class Calibration:
    """Times of a reference step of ``rows``, by layer with experts; the first layer is resident."""

    rows: int
    compute_s: tuple[float, ...]  # of each layer, without its waits
    transfer_s: tuple[float, ...]  # of each gathered layer: all but the first

    @property
    def slowdown(self) -> float:
        """The slowest gathered layer's time, computed and transferred at once, over the first's.

        At least 1. A saturated step is this many times the reference (MoE-Prefill Eq. 3).
        """
        gathered = zip(self.compute_s[1:], self.transfer_s, strict=True)
        slowest = max((max(times) for times in gathered), default=0.0)
        return max(1.0, slowest / self.compute_s[0]) if self.compute_s[0] > 0 else 1.0

    def saturation_flops(self, reference_flops: int) -> int:
        """The least work that hides the slowest transfer, F* in the paper.

        ``reference_flops`` is the work of the reference step.
        """
        return saturation_flops(reference_flops, self.slowdown)


def rows_to_hide(transfer_s: float, layer: PartCost) -> float | None:
    """Rows at which a layer computes for as long as its transfer takes.

    Args:
        transfer_s: seconds of the transfer.
        layer: cost of the layer, constant and by the row.

    Returns:
        ``None`` if more rows do not take longer.
    """
    fixed_s, row_s = layer.unit_s
    return max(0.0, (transfer_s - fixed_s) / row_s) if row_s > 0 else None
