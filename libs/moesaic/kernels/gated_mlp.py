"""The gated MLP: dense layers, shared experts and routed ones."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch.nn import functional as F

from moesaic.kernels.held_bytes import Quantization
from moesaic.kernels.linear import check_quantization, plain_weight
from moesaic.kernels.packed_experts import Clamped, PackedMLP
from moesaic.kernels.stored_weights import StoredWeight
from moesaic.native.library import computes_on


class GatedMLP(Protocol):
    """``down(silu(gate(x)) * up(x))``, or with another activation: ``[T, H]`` -> ``[T, H]``, same dtype."""

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
    biases: tuple[Tensor, Tensor] | None = None,
    activation: Clamped | None = None,
) -> GatedMLP:
    """Bring ``gate_up`` ``[2I, H]``, gate before up, and ``down`` ``[H, I]`` into their fastest form.

    ``biases``, ``[2I]`` and ``[H]``, are added to their outputs.

    Raises:
        ValueError: a quantisation is asked for where it cannot be computed.
    """
    if computes_on(gate_up.device):
        return PackedMLP(gate_up, down, quantization, biases=biases, activation=activation)
    check_quantization(gate_up.device, quantization)
    first, second = plain_weight(gate_up), plain_weight(down)
    if biases is not None:
        biases = biases[0].to(first.dtype), biases[1].to(first.dtype)
    return PlainMLP(first, second, biases, activation)


@dataclass(frozen=True)
class PlainMLP:
    """Weights as the checkpoint has them."""

    gate_up: Tensor  # [2I, H]
    down: Tensor  # [H, I]
    biases: tuple[Tensor, Tensor] | None = None  # [2I] and [H]
    activation: Clamped | None = None

    @property
    def nbytes(self) -> int:
        """See ``GatedMLP.nbytes``."""
        return sum(each.nbytes for each in (self.gate_up, self.down, *(self.biases or ())))

    def __call__(self, x: Tensor) -> Tensor:
        """See ``GatedMLP``."""
        of_gate_up, of_down = self.biases or (None, None)
        gate, up = F.linear(x, self.gate_up, of_gate_up).chunk(2, dim=-1)
        return F.linear(_activated(gate, up, self.activation), self.down, of_down)


def _activated(gate: Tensor, up: Tensor, activation: Clamped | None) -> Tensor:
    if activation is None:
        return F.silu(gate).mul_(up)
    slope, limit = activation
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate.mul(slope).sigmoid_().mul_(gate).mul_(up + 1)
