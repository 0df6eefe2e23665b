"""A checkpoint read under one prefix, to one dtype of matrices and one device."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moesaic.kernels.gated_mlp import GatedMLP, make_mlp
from moesaic.kernels.held_bytes import Quantization
from moesaic.kernels.linear import Linear, activation_dtype, make_linear
from moesaic.kernels.stored_weights import StoredWeight, dequantised
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

    def under(self, prefix: str) -> "TensorReader":
        """Return a reader of the tensors whose names go on with ``prefix``."""
        return replace(self, prefix=self.prefix + prefix)

    def read(self, name: str, *shape: int) -> Tensor:
        """Read the tensor ``name`` under the prefix.

        Raises:
            CheckpointError: it is missing, mis-shaped or cannot be read.
        """
        return self.checkpoint.read(self.prefix + name, shape, self.dtype, self.device)

    def vector(self, name: str, *shape: int) -> Tensor:
        """Read a norm's weights or a bias, which are as activations are; raises as ``read``."""
        dtype = activation_dtype(self.dtype, self.device)
        return self.checkpoint.read(self.prefix + name, shape, dtype, self.device)

    def weight(self, name: str, num_out: int, num_in: int) -> StoredWeight:
        """Read the matrix ``name`` under the prefix, ``[num_out, num_in]``, in whatever format it is stored.

        Raises:
            CheckpointError: a tensor of it is missing, mis-shaped or cannot be read.
        """
        shape = num_out, num_in
        return read_matrix(
            self.checkpoint,
            self.weight_format,
            self.prefix + name,
            shape,
            self.dtype,
            self.device,
        )

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
