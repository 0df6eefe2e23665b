"""The SwiGLU MLP: dense layers, shared experts and routed ones."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from moesaic.kernels.linear import PackedMatrix, Quantization, check_int8
from moesaic.kernels.native.library import Expert, lib, usable


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
    """The fastest form of ``gate_up`` ``[2I, H]``, gate before up, and ``down`` ``[H, I]``; not
    ``lasting`` if it is only made to be copied.

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


class PackedMLP:
    """Weights packed for the kernels for CPUs: each panel of the first has gates and their ups."""

    def __init__(
        self,
        gate_up: Tensor,
        down: Tensor,
        quantization: Quantization = "none",
        *,
        lasting: bool = True,
    ) -> None:
        """Pack the weights; the caller's are needed no longer."""
        hidden_size, size = down.shape
        half = lib().panel_width() // 2
        padded = -(-size // half) * half
        halves = gate_up.new_zeros(2, padded, hidden_size)
        halves[:, :size] = gate_up.view(2, size, -1)
        mixed = halves.view(2, -1, half, hidden_size).transpose(0, 1).flatten(0, 2)
        pack = PackedMatrix.int8 if quantization == "int8" else PackedMatrix.float32
        self._take(pack(mixed, lasting=lasting), pack(down, lasting=lasting))

    @classmethod
    def of_packed(cls, gate_up: PackedMatrix, down: PackedMatrix) -> "PackedMLP":
        """Compute with what another has packed, where it lies."""
        mlp = cls.__new__(cls)
        mlp._take(gate_up, down)
        return mlp

    def _take(self, gate_up: PackedMatrix, down: PackedMatrix) -> None:
        self.hidden_size, self.size = down.shape
        self.matrices = gate_up, down
        self.nbytes = gate_up.nbytes + down.nbytes
        self.c = Expert(gate_up.c, down.c)

    def __call__(self, x: Tensor) -> Tensor:
        """See ``GatedMLP``; float32. As the only expert of every row."""
        from moesaic.kernels.grouped_experts import PackedSlots

        return PackedSlots([self]).compute(x, *_all_in_one(len(x)))


@lru_cache(maxsize=64)
def _all_in_one(num_rows: int) -> tuple[Tensor, Tensor]:
    return torch.ones(num_rows, 1), torch.zeros(num_rows, 1, dtype=torch.int32)
