"""A checkpoint read under one prefix, to one dtype of matrices and one device."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moesaic.kernels.gated_mlp import GatedMLP, make_mlp
from moesaic.kernels.held_bytes import Quantization
from moesaic.kernels.linear import Linear, activation_dtype, make_linear
from moesaic.kernels.stored_weights import StoredWeight, dequantised, take_columns, take_rows
from moesaic.models.configuration.division import Cut, Division
from moesaic.models.configuration.weight_format import WeightFormat
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.models.weights.formats.reading import joined, read_matrix


@dataclass(frozen=True)
class TensorReader:
    """Reads the weights of a layer, for its ``load`` function."""

    checkpoint: Checkpoint
    dtype: torch.dtype
    device: torch.device
    quantization: Quantization = "none"
    prefix: str = ""
    weight_format: WeightFormat | None = None
    division: Division | None = None  # None: this rank is the only one

    def under(self, prefix: str) -> "TensorReader":
        """Return a reader of the tensors whose names continue with ``prefix``."""
        return replace(self, prefix=self.prefix + prefix)

    def read(self, name: str, *shape: int) -> Tensor:
        """Read the tensor ``name`` under the prefix; of a divided one, this rank's part, of this ``shape``.

        Raises:
            CheckpointError: it is missing, mis-shaped or cannot be read.
        """
        return self._vector(name, shape, self.dtype)

    def vector(self, name: str, *shape: int) -> Tensor:
        """Read a norm's weights or a bias, which are as activations are; raises as ``read``."""
        return self._vector(name, shape, activation_dtype(self.dtype, self.device))

    def weight(self, name: str, num_out: int, num_in: int) -> StoredWeight:
        """Read the matrix ``name`` under the prefix, ``[num_out, num_in]``, stored in any format.

        Of a divided one, this rank's part has that shape.

        Raises:
            CheckpointError: a tensor of it is missing, mis-shaped or cannot be read.
        """
        cut = self.division.cut_of(name) if self.division else None
        full = _full((num_out, num_in), cut)
        whole = read_matrix(
            self.checkpoint,
            self.weight_format,
            self.prefix + name,
            (full[0], full[1]),
            self.dtype,
            self.device,
        )
        return whole if cut is None else self._part(whole, cut)

    def _vector(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        cut = self.division.cut_of(name) if self.division else None
        full = _full(shape, cut)
        whole = self.checkpoint.read(self.prefix + name, full, dtype, self.device)
        if self.division and self.division.leaves_out(name):
            return torch.zeros_like(whole)
        if cut is None:
            return whole
        size = shape[cut.axis] // cut.pieces
        parts = whole.chunk(cut.pieces, cut.axis)
        return torch.cat(
            [each.narrow(cut.axis, cut.index * size, size) for each in parts], cut.axis
        )

    def _part(self, whole: StoredWeight, cut: Cut) -> StoredWeight:
        if cut.axis == 1:
            size = whole.shape[1] // cut.count
            return take_columns(whole, cut.index * size, (cut.index + 1) * size, self.dtype)
        size = whole.shape[0] // cut.pieces // cut.count
        firsts = [piece * size * cut.count + cut.index * size for piece in range(cut.pieces)]
        return self.joined(*(take_rows(whole, slice(first, first + size)) for first in firsts))

    def numbers(self, name: str, num_out: int, num_in: int) -> Tensor:
        """Read a matrix as ``weight`` does, and what it stands for."""
        return dequantised(self.weight(name, num_out, num_in), self.dtype)

    def joined(self, *weights: StoredWeight) -> StoredWeight:
        """Put the outputs of ``weights`` one below the other."""
        return joined(weights, self.dtype)

    def mlp(self, gate_up: StoredWeight, down: StoredWeight) -> GatedMLP:
        """Make an MLP, quantised if the reader is."""
        return make_mlp(gate_up, down, self.quantization)

    def linear(self, weight: StoredWeight, bias: Tensor | None = None) -> Linear:
        """Make a linear layer of ``weight``, quantised if the reader is."""
        return make_linear(weight, bias, self.quantization)


def _full(shape: tuple[int, ...], cut: Cut | None) -> tuple[int, ...]:
    """Return the shape of the tensor that a part has this shape of."""
    if cut is None:
        return shape
    return tuple(size * cut.count if axis == cut.axis else size for axis, size in enumerate(shape))
