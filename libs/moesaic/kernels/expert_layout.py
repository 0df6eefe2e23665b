"""The layout of one expert as a single run of bytes, which is computed with in place.

This run moves between processes, and between a file and memory; the weights are packed before.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
from torch import Tensor

from moesaic.kernels.coded_matrix import CodedMatrix, coded_form, coded_parts, fill_coded
from moesaic.kernels.gated_mlp import CodedMLP, GatedMLP, PlainMLP
from moesaic.kernels.held_bytes import Dtype, Quantization, WeightForm
from moesaic.kernels.linear import check_quantization
from moesaic.kernels.packed_experts import Clamped, PackedMLP
from moesaic.kernels.packed_matrix import (
    PackedMatrix,
    Shapes,
    form_of,
    pack,
    parts_of,
    whole_panels,
)
from moesaic.kernels.stored_weights import StoredWeight, dequantised
from moesaic.native.library import computes_on, lib

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
        dtype: dtype of weights that are not quantised.
        quantization: quantisation of such weights when they are packed.
        as_stored: no panels on any processor, and nothing quantised: the bytes are for a GPU.
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
            told = coded_form(weight) if self.as_stored else form_of(weight)
            own = None if isinstance(weight, Tensor) else told
            if own != self.codes:
                raise ValueError(f"an expert's weights are {own}, the layout's {self.codes}")
        for matrix, (weight, form) in enumerate(zip((gate_up, down), self._forms, strict=True)):
            parts = {p.name: _view(into, p) for p in self._parts if p.matrix == matrix}
            bias = None if biases is None else biases[matrix]
            if self.as_stored and not isinstance(weight, Tensor):
                fill_coded(weight, parts, bias)
                continue
            if form is not None:
                pack(weight, form, parts, bias, halves=1 if matrix else 2)
                continue
            parts["weight"].copy_(dequantised(weight, parts["weight"].dtype))
            if bias is not None:
                parts["bias"].copy_(bias)

    def view(self, packed: Tensor) -> GatedMLP:
        """Return an MLP that computes with the bytes ``packed``, uint8 ``[nbytes]``, in place."""
        first, second = (
            {p.name: _view(packed, p) for p in self._parts if p.matrix == matrix}
            for matrix in range(2)
        )
        of_gate_up, of_down = self._forms
        if of_gate_up is None or of_down is None:
            biases = (first["bias"], second["bias"]) if self.biased else None
            return PlainMLP(first["weight"], second["weight"], biases, self.activation)
        hidden = self.hidden_size
        if self.as_stored:
            coded = CodedMatrix((2 * self.size, hidden), of_gate_up, first)
            return CodedMLP(
                coded, CodedMatrix((hidden, self.size), of_down, second), self.activation
            )
        padded = whole_panels(2 * self.size, 2)
        gate_up = PackedMatrix((padded, hidden), of_gate_up, **first)
        down = PackedMatrix((hidden, self.size), of_down, **second)
        return PackedMLP.of_packed(gate_up, down, self.activation)

    @cached_property
    def packs_stored(self) -> bool:
        """True if ``pack`` takes weights as files have them, and writes them in one pass."""
        kinds = {form.kind if form else "plain" for form in self._forms}
        return self.dtype == torch.float32 and kinds <= {"float32", "int8"}

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
        panels = "as stored" if self.as_stored or None in self._forms else widths
        if self.as_stored and self.codes and self.codes.levels:
            # The table of levels is no part of the bytes.
            panels += ", e2m1"
        return f"{self.hidden_size}x{self.size}, {panels}: {', '.join(parts)}"

    @cached_property
    def _forms(self) -> tuple[WeightForm | None, WeightForm | None]:
        """The forms in which gate_up and down are packed; None: they are plain."""
        if self.as_stored:
            return self.codes, self.codes
        cpu = torch.device("cpu")
        if not computes_on(cpu):
            check_quantization(cpu, self.quantization)
            return None, None
        name = cast("Dtype", str(self.dtype).removeprefix("torch."))
        form = self.codes or WeightForm.of(name, self.quantization)
        return form, form

    @cached_property
    def _parts(self) -> tuple[_Part, ...]:
        shapes = (2 * self.size, self.hidden_size), (self.hidden_size, self.size)
        plain = self.dtype if self.as_stored else torch.float32
        parts: list[_Part] = []
        for matrix, (form, (num_out, num_in)) in enumerate(zip(self._forms, shapes, strict=True)):
            if form is None:
                told: Shapes = {"weight": (plain, (num_out, num_in))}
                told |= {"bias": (plain, (num_out,))} if self.biased else {}
            elif self.as_stored:
                told = coded_parts(form, num_out, num_in, biased=self.biased)
            else:
                padded = whole_panels(num_out, 1 if matrix else 2)
                told = parts_of(form, padded, num_in, biased=self.biased)
            for name, (dtype, shape) in told.items():
                start = _aligned(parts[-1].end) if parts else 0
                parts.append(_Part(matrix, name, dtype, shape, start))
        return tuple(parts)


def _view(packed: Tensor, part: _Part) -> Tensor:
    return packed[part.start : part.end].view(part.dtype).view(part.shape)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
