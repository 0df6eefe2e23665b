"""DirectBatch: rows of one layer that go directly to expert workers."""

from dataclasses import dataclass

from torch import Tensor

from moesaic.dispatch.routed.route import BatchUnderWay
from moesaic.kernels.promised import PromisedRows
from moesaic.messages.wire import WireDtype


@dataclass(frozen=True, eq=False)
class DirectBatch:
    """A batch that goes directly."""

    under_way: BatchUnderWay
    hidden_states: Tensor  # [T, H], where the model is
    rows: Tensor  # the same, where they are sent from
    basis: Tensor
    wire: WireDtype
    apart: bool  # they are sent from the device, else from the CPU
    promised: PromisedRows | None

    @property
    def layer(self) -> int:
        """Index of the decoder layer."""
        return self.under_way.layer
