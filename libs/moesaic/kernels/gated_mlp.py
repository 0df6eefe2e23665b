"""The SwiGLU MLP: dense layers, shared experts and routed ones."""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from moesaic.kernels.linear import Linear, PlainLinear, Quantization, Rows, make_linear


@dataclass(frozen=True)
class GatedMLP:
    """``down(silu(gate(x)) * up(x))``."""

    gate_up: Linear  # H -> 2I: gate, then up
    down: Linear  # I -> H

    @classmethod
    def of(cls, gate_up: Tensor, down: Tensor, quantization: Quantization = "none") -> "GatedMLP":
        """Take ``gate_up`` ``[2I, H]`` and ``down`` ``[H, I]``."""
        return cls(
            make_linear(gate_up, quantization=quantization),
            make_linear(down, quantization=quantization),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return self.gate_up.nbytes + self.down.nbytes

    def plain_weights(self) -> tuple[Tensor, Tensor]:
        """``gate_up`` ``[2I, H]`` and ``down`` ``[H, I]``, held as the checkpoint has them."""
        assert isinstance(self.gate_up, PlainLinear)
        assert isinstance(self.down, PlainLinear)
        return self.gate_up.weight, self.down.weight

    def __call__(self, x: Tensor) -> Tensor:
        """``[T, H]`` -> ``[T, H]``, same dtype."""
        return self.multiply(self.gate_up.prepare(x)).to(x.dtype)

    def multiply(self, rows: Rows) -> Tensor:
        """The same for rows that ``gate_up`` has prepared; see ``Linear.multiply``."""
        return self.down(activate(self.gate_up.multiply(rows)))


def activate(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up``: ``[T, 2I]`` -> ``[T, I]``."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
