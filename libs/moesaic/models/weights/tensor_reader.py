"""A checkpoint read under one prefix, to one dtype and device."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moesaic.kernels.linear import Linear, Quantization, make_linear
from moesaic.models.tensor_parallel.division import Division
from moesaic.models.weights.checkpoint import Checkpoint


@dataclass(frozen=True)
class TensorReader:
    """Reads the weights of a layer, for its ``load`` function."""

    checkpoint: Checkpoint
    dtype: torch.dtype
    device: torch.device
    quantization: Quantization = "none"
    prefix: str = ""
    division: Division | None = None  # None: this rank is the only one

    def under(self, prefix: str) -> "TensorReader":
        """Return a reader of the tensors whose names go on with ``prefix``."""
        return replace(self, prefix=self.prefix + prefix)

    def read(self, name: str, *shape: int) -> Tensor:
        """Read the tensor ``name`` under the prefix; of a divided one, this rank's part, of this ``shape``.

        Raises:
            CheckpointError: it is missing, mis-shaped or cannot be read.
        """
        cut = self.division.cut_of(name) if self.division else None
        if cut is None:
            whole = self.checkpoint.read(self.prefix + name, shape, self.dtype, self.device)
            left_out = self.division is not None and self.division.leaves_out(name)
            return torch.zeros_like(whole) if left_out else whole
        full = tuple(size * cut.count if i == cut.axis else size for i, size in enumerate(shape))
        whole = self.checkpoint.read(self.prefix + name, full, self.dtype, self.device)
        size = shape[cut.axis] // cut.pieces
        parts = [
            each.narrow(cut.axis, cut.index * size, size)
            for each in whole.chunk(cut.pieces, cut.axis)
        ]
        return torch.cat(parts, cut.axis)

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Make a linear layer of ``weight``, quantised if the reader is."""
        return make_linear(weight, bias, self.quantization)
