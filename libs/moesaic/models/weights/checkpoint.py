"""Read single tensors, or slices of them, from a model directory's safetensors files."""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from moesaic.errors import CheckpointError
from moesaic.models.configuration.architecture import ModelConfig
from moesaic.models.weights.files import list_tensors
from moesaic.models.weights.header import Stamp, StoredTensor
from moesaic.models.weights.inventory import check_tensors
from moesaic.models.weights.payload import CODE_DTYPES, STORED_DTYPES, fill, fill_codes
from moesaic.native.memory import reusable
from moesaic.telemetry.loading import LoadProgress


class Checkpoint:
    """The tensors of one model directory; opening it checks every header and reads no payload.

    Payload is read from the file straight into the tensor that is returned. Nothing is mapped or
    cached, so what a process keeps is its own tensors and no more. Safe to use from several
    threads.

    Attributes:
        directory: directory of the model.
        progress: progress of loading, in bytes of these files.
    """

    def __init__(self, directory: Path) -> None:
        """Check the headers of all files.

        Raises:
            CheckpointError: there are no safetensors, a file is damaged or truncated, a shard is
                missing, or the index and the shards list different tensors.
        """
        self.directory, self.progress = directory, LoadProgress()
        self._tensors = list_tensors(directory)

    @classmethod
    def of_model(cls, directory: Path, config: ModelConfig) -> "Checkpoint":
        """Open the checkpoint of the model that ``config`` describes, and of no other.

        Raises:
            CheckpointError: as for the constructor, or there are tensors that are never read.
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
        """Stored bytes of these tensors, as far as they exist."""
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
        # Before there is memory for it.
        self._find(name, shape)
        return self.read_into(name, reusable(shape, dtype)).to(device)

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

    def read_slice(
        self,
        name: str,
        index: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        """Read entry ``index`` along the first axis of the tensor ``name`` of ``shape``; raises as ``read`` does."""
        self._find(name, shape)
        into = torch.empty(shape[1:], dtype=dtype)
        self.read_slice_into(name, index, shape[0], into)
        return into.to(device)

    def read_codes(
        self,
        name: str,
        shape: tuple[int, ...],
        stored_dtype: str,
        device: torch.device,
        index: int | None = None,
    ) -> Tensor:
        """Read the tensor ``name`` of ``shape``, or entry ``index`` along its first axis, bit for bit.

        Returns:
            ``stored_dtype`` (``U8``, ``I32``, ``I64``) as torch has it, and ``F8_E4M3`` as uint8.

        Raises:
            CheckpointError: there is no such tensor, its shape or dtype is another, or it cannot be read.
        """
        stored = self._find(name, shape, (stored_dtype,))
        num, of_each = (1, shape) if index is None else (shape[0], shape[1:])
        start = stored.start + (index or 0) * (stored.nbytes // num)
        codes = reusable(of_each, CODE_DTYPES[stored_dtype])
        fill_codes(name, stored, start, codes, self.progress)
        return codes.to(device)

    def stored(self, name: str) -> StoredTensor | None:
        """Return what the files say of the tensor ``name``; None: there is no such tensor."""
        return self._tensors.get(name)

    def error(self, name: str, problem: str) -> CheckpointError:
        """Make the error about the tensor ``name``, for the caller to raise."""
        return CheckpointError(self._tensors[name].file.name, problem, tensor=name)

    def _find(
        self,
        name: str,
        shape: tuple[int, ...] | None = None,
        dtypes: Iterable[str] = STORED_DTYPES,
    ) -> StoredTensor:
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
        if stored.dtype not in dtypes:
            raise CheckpointError(
                stored.file.name,
                f"expected one of {', '.join(dtypes)}, found {stored.dtype}",
                tensor=name,
            )
        return stored
