"""The tensors that make up one matrix, read by the ends of their names."""

from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.errors import CheckpointError
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.models.weights.header import StoredTensor

CPU = torch.device("cpu")


@dataclass(frozen=True)
class MatrixParts:
    """Reads ``PREFIX.PART`` to the CPU; every method raises ``CheckpointError`` for what is not as asked."""

    checkpoint: Checkpoint
    prefix: str

    def stored(self, part: str) -> StoredTensor | None:
        """See ``Checkpoint.stored``."""
        return self.checkpoint.stored(self._name(part))

    def codes(self, part: str, stored_dtype: str, *shape: int) -> Tensor:
        """Read codes; see ``Checkpoint.read_codes``."""
        return self.checkpoint.read_codes(self._name(part), shape, stored_dtype, CPU)

    def numbers(self, part: str, *shape: int) -> Tensor:
        """Read float32."""
        return self.checkpoint.read(self._name(part), shape, torch.float32, CPU)

    def error(self, part: str, problem: str) -> CheckpointError:
        """Make the error about one of the tensors, for the caller to raise."""
        return self.checkpoint.error(self._name(part), problem)

    def _name(self, part: str) -> str:
        return f"{self.prefix}.{part}"
