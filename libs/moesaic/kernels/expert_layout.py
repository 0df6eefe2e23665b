"""The layout of one expert as a single run of bytes, which is computed with in place.

This run moves between processes, and between a file and memory; the weights are packed before.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from moesaic.kernels.gated_mlp import GatedMLP, PlainMLP, make_mlp
from moesaic.kernels.held_bytes import Quantization, WeightForm
from moesaic.kernels.packed_experts import Clamped, PackedMLP
from moesaic.kernels.packed_matrix import PackedMatrix, form_of, pack
from moesaic.kernels.stored_weights import Fp8Weight, Int4Weight, StoredWeight, dequantised
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
        dtype: of weights that are numbers.
        quantization: of numbers, as they are packed.
        as_stored: no panels, whatever the processor here: the bytes are for a GPU.
        biased: both products have biases, which travel with the weights.
        activation: between the products; it is no part of the bytes.
        codes: the form of a checkpoint's own codes, int4 or fp8; None: it has numbers.
    """

    hidden_size: int
    size: int
    dtype: torch.dtype
    quantization: Quantization = "none"
    as_stored: bool = False
    biased: bool = False
    activation: Clamped | None = None
    codes: WeightForm | None = None

    def pack(
        self,
        gate_up: StoredWeight,
        down: StoredWeight,
        into: Tensor,
        biases: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Write an expert's weights, ``gate_up`` ``[2I, H]`` and ``down`` ``[H, I]``, as the bytes
        ``into``, uint8 ``[nbytes]``; and its ``biases``, ``[2I]`` and ``[H]``, if the layout is ``biased``.

        Numbers are of ``dtype``; or of any dtype that files have, if this ``packs_stored``.

        Raises:
            ValueError: they are codes in another form than the layout's.
        """
        assert (biases is not None) == self.biased
        for weight in (gate_up, down):
            own = None if isinstance(weight, Tensor) else form_of(weight)
            if own != self.codes:
                raise ValueError(f"an expert's weights are {own}, the layout's {self.codes}")
        matrices = self._form[1]
        if matrices is not None:
            for matrix, weight in enumerate((gate_up, down)):
                parts = {p.name: _view(into, p) for p in self._parts if p.matrix == matrix}
                bias = None if biases is None else biases[matrix]
                pack(weight, matrices[matrix][1], parts, bias, halves=1 if matrix else 2)
            return
        tensors = _tensors_of(self._make(gate_up, down, biases))
        for part in self._parts:
            _view(into, part).copy_(tensors[part.matrix][part.name])

    def view(self, packed: Tensor) -> GatedMLP:
        """Return an MLP that computes with the bytes ``packed``, uint8 ``[nbytes]``, in place."""
        tensors: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
        for part in self._parts:
            tensors[part.matrix][part.name] = _view(packed, part)
        matrices = self._form[1]
        if matrices is None:
            biases = (tensors[0]["bias"], tensors[1]["bias"]) if self.biased else None
            return PlainMLP(tensors[0]["weight"], tensors[1]["weight"], biases, self.activation)
        gate_up, down = (
            PackedMatrix(shape, form, **parts)
            for (shape, form), parts in zip(matrices, tensors, strict=True)
        )
        return PackedMLP.of_packed(gate_up, down, self.activation)

    @cached_property
    def packs_stored(self) -> bool:
        """True if ``pack`` takes weights as files have them, and writes them in one pass."""
        kinds = {form.kind for _, form in self._form[1] or ()}
        return bool(kinds) and self.dtype == torch.float32 and kinds <= {"float32", "int8"}

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
        widths = f"panels of {lib().panel_width()}, vectors of {lib().vector_width()}"
        panels = widths if self._form[1] else "as stored"
        return f"{self.hidden_size}x{self.size}, {panels}: {', '.join(parts)}"

    @property
    def _parts(self) -> tuple[_Part, ...]:
        return self._form[0]

    def _make(
        self,
        gate_up: StoredWeight,
        down: StoredWeight,
        biases: tuple[Tensor, Tensor] | None,
    ) -> GatedMLP:
        if self.as_stored and self.quantization == "none":
            first, second = (dequantised(weight, self.dtype) for weight in (gate_up, down))
            return PlainMLP(first, second, biases)
        return make_mlp(gate_up, down, self.quantization, biases=biases)

    def _zeros(self, num_out: int, num_in: int) -> StoredWeight:
        if self.codes is None:
            return torch.zeros(num_out, num_in, dtype=self.dtype)
        codes = torch.zeros(num_out, num_in, dtype=torch.uint8)
        scales = torch.zeros(num_out, -(-num_in // self.codes.group))
        if self.codes.kind == "fp8":
            return Fp8Weight(codes, scales, self.codes.group)
        zeros = scales if self.codes.zeros else None
        levels = torch.zeros(16, dtype=torch.int8) if self.codes.levels else None
        return Int4Weight(codes, scales, zeros, levels, self.codes.group)

    @cached_property
    def _form(
        self,
    ) -> tuple[tuple[_Part, ...], tuple[tuple[tuple[int, ...], WeightForm], ...] | None]:
        """The parts, and the shapes and forms of the matrices if these are packed, as a sample shows."""
        gate_up = self._zeros(2 * self.size, self.hidden_size)
        down = self._zeros(self.hidden_size, self.size)
        biases = tuple(torch.zeros(len(w), dtype=self.dtype) for w in (gate_up, down))
        sample = self._make(gate_up, down, (biases[0], biases[1]) if self.biased else None)
        parts: list[_Part] = []
        for matrix, tensors in enumerate(_tensors_of(sample)):
            for name, tensor in tensors.items():
                start = _aligned(parts[-1].end) if parts else 0
                parts.append(_Part(matrix, name, tensor.dtype, tensor.shape, start))
        if not isinstance(sample, PackedMLP):
            return tuple(parts), None
        return tuple(parts), tuple((matrix.shape, matrix.form) for matrix in sample.matrices)


def _tensors_of(mlp: GatedMLP) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    if isinstance(mlp, PackedMLP):
        gate_up, down = mlp.matrices
        return gate_up.parts, down.parts
    assert isinstance(mlp, PlainMLP)
    if mlp.biases is None:
        return {"weight": mlp.gate_up}, {"weight": mlp.down}
    of_gate_up, of_down = mlp.biases
    return {"weight": mlp.gate_up, "bias": of_gate_up}, {"weight": mlp.down, "bias": of_down}


def _view(packed: Tensor, part: _Part) -> Tensor:
    return packed[part.start : part.end].view(part.dtype).view(part.shape)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
