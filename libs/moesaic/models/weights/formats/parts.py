"""The tensors that make up one matrix, read by the ends of their names."""

from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.errors import CheckpointError
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.models.weights.header import StoredTensor

EXPONENTS = ("F8_E8M0", "U8")
CPU = torch.device("cpu")
# The powers of two by their exponents plus 127, one byte each; the last is NaN.
_POWERS = torch.tensor([2.0 ** (exponent - 127) for exponent in range(255)] + [torch.nan])


@dataclass(frozen=True)
class MatrixParts:
    """Reads ``PREFIX.PART`` to the CPU; every method raises ``CheckpointError`` for an unexpected tensor.

    Attributes:
        checkpoint: the files.
        prefix: prefix of the tensors' names; if a tensor has several matrices, the name of the codes.
        index: index of the matrix, if each tensor has ``num`` matrices; None: it has one.
        num: number of matrices in a tensor.
    """

    checkpoint: Checkpoint
    prefix: str
    index: int | None = None
    num: int = 1

    def stored(self, part: str) -> StoredTensor | None:
        """See ``Checkpoint.stored``."""
        return self.checkpoint.stored(self._name(part))

    def shape(self, part: str) -> tuple[int, ...] | None:
        """Return the shape of a part for this matrix; None: there is no such tensor."""
        stored = self.stored(part)
        if stored is None:
            return None
        return stored.shape if self.index is None else stored.shape[1:]

    def codes(self, part: str, stored_dtype: str, *shape: int) -> Tensor:
        """Read codes; see ``Checkpoint.read_codes``."""
        whole = self._whole(shape)
        return self.checkpoint.read_codes(self._name(part), whole, stored_dtype, CPU, self.index)

    def numbers(self, part: str, *shape: int) -> Tensor:
        """Read float32."""
        name, whole = self._name(part), self._whole(shape)
        if self.index is None:
            return self.checkpoint.read(name, whole, torch.float32, CPU)
        return self.checkpoint.read_slice(name, self.index, whole, torch.float32, CPU)

    def scales(self, part: str, *shape: int) -> Tensor:
        """Read float32 scales; the file may have the exponents of powers of two."""
        stored = self.stored(part)
        if stored is None or stored.dtype not in EXPONENTS:
            return self.numbers(part, *shape)
        scales = _POWERS[self.codes(part, stored.dtype, *shape).long()]
        if bool(scales.isnan().any()):
            raise self.error(part, "some of its scales are NaN: the file is damaged")
        return scales

    def error(self, part: str, problem: str) -> CheckpointError:
        """Make an error about one of the tensors, for the caller to raise."""
        return self.checkpoint.error(self._name(part), problem)

    def _whole(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape if self.index is None else (self.num, *shape)

    def _name(self, part: str) -> str:
        if self.index is None:
            return f"{self.prefix}.{part}"
        return self.prefix + part.removeprefix("weight")


@dataclass(frozen=True)
class ApartParts(MatrixParts):
    """Return parts for a matrix whose codes are in separate ``matrices``, one below the other."""

    matrices: tuple[str, ...] = ()

    def codes(self, part: str, stored_dtype: str, *shape: int) -> Tensor:
        """Read codes; see ``Checkpoint.read_codes``."""
        if part != "weight":
            return super().codes(part, stored_dtype, *shape)
        each = shape[0] // len(self.matrices), *shape[1:]
        read = self.checkpoint.read_codes
        return torch.cat([read(name, each, stored_dtype, CPU) for name in self.matrices])

    def error(self, part: str, problem: str) -> CheckpointError:
        """Make an error about one of the tensors, for the caller to raise."""
        if part != "weight":
            return super().error(part, problem)
        return self.checkpoint.error(self.matrices[0], problem)
