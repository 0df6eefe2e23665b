"""The SwiGLU MLP: dense layers, shared experts and routed ones."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch.nn import functional as F

from moesaic.kernels.linear import Quantization, check_int8
from moesaic.kernels.packed_experts import PackedMLP
from moesaic.native.library import usable


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
    gate_up: Tensor, down: Tensor, quantization: Quantization = "none", *, lasting: bool = True
) -> GatedMLP:
    """Bring ``gate_up`` ``[2I, H]``, gate before up, and ``down`` ``[H, I]`` into their fastest form.

    It is not ``lasting`` if it is only made to be copied.

    Raises:
        ValueError: int8 is asked for where it cannot be computed.
    """
    if quantization == "int8":
        check_int8(gate_up)
    if not usable(gate_up):
        return PlainMLP(gate_up, down)
    return PackedMLP(gate_up, down, quantization, lasting=lasting)


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
