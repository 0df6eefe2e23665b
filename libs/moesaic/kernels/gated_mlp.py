"""The SwiGLU MLP: dense layers, shared experts and routed ones."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch.nn import functional as F

from moesaic.kernels.held_bytes import Quantization
from moesaic.kernels.linear import check_quantization, plain_weight
from moesaic.kernels.packed_experts import PackedMLP
from moesaic.kernels.stored_weights import StoredWeight
from moesaic.native.library import computes_on


class GatedMLP(Protocol):
    """``down(silu(gate(x)) * up(x))``: ``[T, H]`` -> ``[T, H]``, same dtype."""

    @property
    def nbytes(self) -> int:
        """Bytes of the weights as they are held."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the rows of ``x``."""
        ...


def make_mlp(
    gate_up: StoredWeight,
    down: StoredWeight,
    quantization: Quantization = "none",
    *,
    lasting: bool = True,
) -> GatedMLP:
    """Bring ``gate_up`` ``[2I, H]``, gate before up, and ``down`` ``[H, I]`` into their fastest form.

    It is not ``lasting`` if it is only made to be copied.

    Raises:
        ValueError: a quantisation is asked for where it cannot be computed.
    """
    if computes_on(gate_up.device):
        return PackedMLP(gate_up, down, quantization, lasting=lasting)
    check_quantization(gate_up.device, quantization)
    return PlainMLP(plain_weight(gate_up), plain_weight(down))


@dataclass(frozen=True)
class PlainMLP:
    """Weights as the checkpoint has them."""

    gate_up: Tensor  # [2I, H]
    down: Tensor  # [H, I]

    @property
    def nbytes(self) -> int:
        """See ``GatedMLP.nbytes``."""
        return self.gate_up.nbytes + self.down.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """See ``GatedMLP``."""
        gate, up = F.linear(x, self.gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate).mul_(up), self.down)
