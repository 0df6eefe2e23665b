"""The layout of one expert as a single run of bytes, which is computed with in place.

This run moves between processes, and between a file and memory; the weights are packed before.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from moesaic.kernels.gated_mlp import GatedMLP, PlainMLP, make_mlp
from moesaic.kernels.linear import PackedMatrix, Quantization
from moesaic.kernels.packed_experts import PackedMLP
from moesaic.kernels.packing import pack_rows
from moesaic.native.library import lib

_ALIGNMENT = 64  # of every part, for loads of vectors


@dataclass(frozen=True)
class _Part:
    """One tensor within the run."""

    matrix: int  # 0: gate_up, 1: down
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # bytes

    @property
    def end(self) -> int:
        return self.start + math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class ExpertLayout:
    """The places of the parts of an expert; all experts of a model have the same.

    They depend on the processor: panels are as wide as its registers are. Bytes can be exchanged if
    and only if ``name`` is equal.

    Attributes:
        as_stored: no panels, whatever the processor here: the bytes are for a GPU.
    """

    hidden_size: int
    size: int
    dtype: torch.dtype
    quantization: Quantization = "none"
    as_stored: bool = False

    def pack(self, gate_up: Tensor, down: Tensor, into: Tensor) -> None:
        """Write an expert's weights, ``gate_up`` ``[2I, H]`` and ``down`` ``[H, I]``, as the bytes
        ``into``, uint8 ``[nbytes]``.

        They are of ``dtype``; or of any dtype that files have, if this ``packs_stored``.
        """
        if self.packs_stored:
            for matrix, weight in enumerate((gate_up, down)):
                parts = {p.name: _view(into, p) for p in self._parts if p.matrix == matrix}
                pack_rows(weight, **parts, halves=1 if matrix else 2)
            return
        tensors = _tensors_of(self._make(gate_up, down))
        for part in self._parts:
            _view(into, part).copy_(tensors[part.matrix][part.name])

    def view(self, packed: Tensor) -> GatedMLP:
        """Return an MLP that computes with the bytes ``packed``, uint8 ``[nbytes]``, in place."""
        tensors: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
        for part in self._parts:
            tensors[part.matrix][part.name] = _view(packed, part)
        shapes = self._form[1]
        if shapes is None:
            return PlainMLP(tensors[0]["weight"], tensors[1]["weight"])
        gate_up, down = (PackedMatrix(s, **t) for s, t in zip(shapes, tensors, strict=True))
        return PackedMLP.of_packed(gate_up, down)

    @cached_property
    def packs_stored(self) -> bool:
        """True if ``pack`` takes weights as files have them, and writes them in one pass."""
        return self._form[1] is not None and self.dtype == torch.float32

    @cached_property
    def nbytes(self) -> int:
        """Bytes of one expert, a multiple of 64."""
        return _aligned(self._parts[-1].end)

    @cached_property
    def name(self) -> str:
        """A name of everything that the meaning of the bytes depends on."""
        parts = (
            f"{part.matrix}{part.name}:{str(part.dtype).removeprefix('torch.')}"
            f"{'x'.join(map(str, part.shape))}"
            for part in self._parts
        )
        panels = f"panels of {lib().panel_width()}" if self._form[1] else "as stored"
        return f"{self.hidden_size}x{self.size}, {panels}: {', '.join(parts)}"

    @property
    def _parts(self) -> tuple[_Part, ...]:
        return self._form[0]

    def _make(self, gate_up: Tensor, down: Tensor) -> GatedMLP:
        if self.as_stored and self.quantization == "none":
            return PlainMLP(gate_up, down)
        return make_mlp(gate_up, down, self.quantization, lasting=False)

    @cached_property
    def _form(self) -> tuple[tuple[_Part, ...], tuple[tuple[int, ...], ...] | None]:
        """The parts, and the shapes of the matrices if these are packed, as a sample shows."""
        gate_up = torch.zeros(2 * self.size, self.hidden_size, dtype=self.dtype)
        down = torch.zeros(self.hidden_size, self.size, dtype=self.dtype)
        sample = self._make(gate_up, down)
        parts: list[_Part] = []
        for matrix, tensors in enumerate(_tensors_of(sample)):
            for name, tensor in tensors.items():
                start = _aligned(parts[-1].end) if parts else 0
                parts.append(_Part(matrix, name, tensor.dtype, tensor.shape, start))
        shapes = tuple(m.shape for m in sample.matrices) if isinstance(sample, PackedMLP) else None
        return tuple(parts), shapes


def _tensors_of(mlp: GatedMLP) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    if isinstance(mlp, PackedMLP):
        gate_up, down = mlp.matrices
        return gate_up.parts, down.parts
    assert isinstance(mlp, PlainMLP)
    return {"weight": mlp.gate_up}, {"weight": mlp.down}


def _view(packed: Tensor, part: _Part) -> Tensor:
    return packed[part.start : part.end].view(part.dtype).view(part.shape)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
