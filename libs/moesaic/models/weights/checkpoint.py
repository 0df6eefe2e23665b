"""Read single tensors, or slices of them, from a model directory's safetensors files."""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from moesaic.errors import CheckpointError
from moesaic.models.configuration.architecture import ModelConfig
from moesaic.models.weights.files import Stamp, StoredTensor, list_tensors
from moesaic.models.weights.inventory import check_tensors
from moesaic.models.weights.payload import STORED_DTYPES, fill
from moesaic.telemetry.loading import LoadProgress


class Checkpoint:
    """The tensors of one model directory; opening it checks every header and reads no payload.

    Payload is read from the file straight into the tensor that is returned. Nothing is mapped or
    cached, so what a process keeps is its own tensors and no more. Safe to use from several
    threads.

    Attributes:
        directory: of the model.
        progress: of loading, in bytes of these files.
    """

    def __init__(self, directory: Path) -> None:
        """Check the headers of all files.

        Raises:
            CheckpointError: no safetensors, a damaged or truncated file, a missing shard, or a
                tensor that is not in the shard where the index says it is, or only in the shard.
        """
        self.directory, self.progress = directory, LoadProgress()
        self._tensors = list_tensors(directory)

    @classmethod
    def of_model(cls, directory: Path, config: ModelConfig) -> "Checkpoint":
        """Open the checkpoint of the model that ``config`` describes, and of no other.

        Raises:
            CheckpointError: as for the constructor, or there are tensors that nobody would read.
        """
        checkpoint = cls(directory)
        check_tensors(config, checkpoint._tensors)
        return checkpoint

    @property
    def files(self) -> dict[Path, Stamp]:
        """The files that hold tensors, as they were when this was opened; reading fails once they are not."""
        return {stored.file: stored.stamp for stored in self._tensors.values()}

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def nbytes(self, names: Iterable[str]) -> int:
        """Bytes of those of these tensors that there are, as they are stored."""
        return sum(self._tensors[name].nbytes for name in names if name in self._tensors)

    def dtype_of(self, names: Iterable[str]) -> torch.dtype:
        """The dtype in which these tensors are stored; float32, which holds any other, if there are several.

        Raises:
            CheckpointError: one of them is not there.
        """
        dtypes = {STORED_DTYPES.get(self._find(name).dtype) for name in names}
        found = dtypes.pop()
        return torch.float32 if dtypes or found is None else found

    def read(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Read the tensor ``name`` as ``dtype`` to ``device``.

        Raises:
            CheckpointError: there is no such tensor, its shape is not ``shape``, its payload cannot
                be read, or something in it is not finite.
        """
        self._find(name, shape)  # before there is memory for it
        return self.read_into(name, torch.empty(shape, dtype=dtype)).to(device)

    def read_into(self, name: str, into: Tensor) -> Tensor:
        """Read the tensor ``name`` into memory of its shape, contiguous on the CPU; raises as ``read`` does."""
        stored = self._find(name, tuple(into.shape))
        fill(name, stored, stored.start, into, self.progress)
        return into

    def read_slice_into(self, name: str, index: int, num: int, into: Tensor) -> None:
        """Read entry ``index`` of ``num`` along the first axis of the tensor ``name``; see ``read_into``."""
        stored = self._find(name, (num, *into.shape))
        start = stored.start + index * (stored.nbytes // num)
        fill(name, stored, start, into, self.progress)

    def _find(self, name: str, shape: tuple[int, ...] | None = None) -> StoredTensor:
        stored = self._tensors.get(name)
        if stored is None:
            raise CheckpointError(
                str(self.directory), "is missing from the checkpoint", tensor=name
            )
        if shape is not None and stored.shape != shape:
            raise CheckpointError(
                stored.file.name,
                f"expected shape {list(shape)}, found {list(stored.shape)}",
                tensor=name,
            )
        if stored.dtype not in STORED_DTYPES:
            raise CheckpointError(
                stored.file.name,
                f"expected one of {', '.join(STORED_DTYPES)}, found {stored.dtype}",
                tensor=name,
            )
        return stored
