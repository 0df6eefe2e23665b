"""A checkpoint read under one prefix, to one dtype of matrices and one device."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moesaic.kernels.held_bytes import Quantization
from moesaic.kernels.linear import Linear, activation_dtype, make_linear
from moesaic.models.weights.checkpoint import Checkpoint


@dataclass(frozen=True)
class TensorReader:
    """Reads the weights of a layer, for its ``load`` function."""

    checkpoint: Checkpoint
    dtype: torch.dtype
    device: torch.device
    quantization: Quantization = "none"
    prefix: str = ""

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

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Make a linear layer of ``weight``, quantised if the reader is."""
        return make_linear(weight, bias, self.quantization)
