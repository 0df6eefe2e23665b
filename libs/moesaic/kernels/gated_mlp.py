"""The gated MLP: dense layers, shared experts and routed ones."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from torch import Tensor
from torch.nn import functional as F

from moesaic.kernels.coded_matrix import CodedMatrix, coded_form, keeps_codes
from moesaic.kernels.held_bytes import Quantization, WeightForm
from moesaic.kernels.linear import CodedLinear, check_quantization, plain_weight
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
    if not isinstance(gate_up, Tensor) and not isinstance(down, Tensor):
        of_gate_up, of_down = biases or (None, None)
        if keeps_codes(gate_up.device) and coded_form(gate_up) and coded_form(down):
            coded = CodedMatrix.of(gate_up, of_gate_up), CodedMatrix.of(down, of_down)
            return CodedMLP(*coded, activation)
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
        return sum(part.nbytes for of in self.parts for part in of.values())

    @property
    def parts(self) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        """The parts of both matrices, named as those of codes are."""
        of_gate_up, of_down = ({"bias": bias} for bias in self.biases) if self.biases else ({}, {})
        return {"panels": self.gate_up, **of_gate_up}, {"panels": self.down, **of_down}

    @property
    def form(self) -> WeightForm | None:
        """None: they are numbers."""
        return None

    @property
    def size(self) -> int:
        """Return ``I``."""
        return self.down.shape[1]

    def __call__(self, x: Tensor) -> Tensor:
        """See ``GatedMLP``."""
        of_gate_up, of_down = self.biases or (None, None)
        gate, up = F.linear(x, self.gate_up, of_gate_up).chunk(2, dim=-1)
        return F.linear(_activated(gate, up, self.activation), self.down, of_down)


@dataclass(frozen=True)
class CodedMLP:
    """Codes that stay codes on a GPU, with their biases among their parts."""

    gate_up: CodedMatrix  # [2I, H]
    down: CodedMatrix  # [H, I]
    activation: Clamped | None = None

    @property
    def nbytes(self) -> int:
        """See ``GatedMLP.nbytes``."""
        return self.gate_up.nbytes + self.down.nbytes

    @property
    def parts(self) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        """The parts of both matrices."""
        return self.gate_up.parts, self.down.parts

    @property
    def form(self) -> WeightForm:
        """The form of their codes."""
        return self.down.form

    @property
    def size(self) -> int:
        """Return ``I``."""
        return self.down.shape[1]

    @cached_property
    def _layers(self) -> tuple[CodedLinear, CodedLinear]:
        return CodedLinear(self.gate_up), CodedLinear(self.down)

    def __call__(self, x: Tensor) -> Tensor:
        """See ``GatedMLP``."""
        first, second = self._layers
        gate, up = first(x).chunk(2, dim=-1)
        return second(_activated(gate, up, self.activation))


def _activated(gate: Tensor, up: Tensor, activation: Clamped | None) -> Tensor:
    if activation is None:
        return F.silu(gate).mul_(up)
    slope, limit = activation
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate.mul(slope).sigmoid_().mul_(gate).mul_(up + 1)
