"""Read single tensors, or slices of them, from a model directory's safetensors files."""

import os
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from moesaic.errors import CheckpointError
from moesaic.models.configuration.architecture import ModelConfig
from moesaic.models.weights.files import Stamp, StoredTensor, list_tensors
from moesaic.models.weights.inventory import check_tensors

_STORED_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_CODES = {"U8": torch.uint8, "F8_E4M3": torch.uint8, "I32": torch.int32, "I64": torch.int64}


class Checkpoint:
    """The tensors of one model directory; opening it checks every header and reads no payload.

    Payload is read from the file straight into the tensor that is returned. Nothing is mapped or
    cached, so what a process keeps is its own tensors and no more. Safe to use from several
    threads.
    """

    def __init__(self, directory: Path) -> None:
        """Check the headers of all files.

        Raises:
            CheckpointError: no safetensors, a damaged or truncated file, a missing shard, or a
                tensor that is not in the shard where the index says it is, or only in the shard.
        """
        self.directory = directory
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

    def read(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Read the tensor ``name`` as ``dtype`` to ``device``.

        Raises:
            CheckpointError: there is no such tensor, its shape is not ``shape``, its payload cannot
                be read, or something in it is not finite.
        """
        stored = self._find(name, shape)
        return _load(name, stored, stored.shape, stored.start, dtype, device)

    def read_slice(
        self,
        name: str,
        index: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        """Read entry ``index`` along the first axis of the tensor ``name`` of ``shape``.

        Raises:
            CheckpointError: as for ``read``.
        """
        stored = self._find(name, shape)
        stride = stored.nbytes // shape[0]
        return _load(name, stored, shape[1:], stored.start + index * stride, dtype, device)

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
        stored, dtype = self._find(name, shape, (stored_dtype,)), _CODES[stored_dtype]
        if index is None:
            return _load_payload(name, stored, shape, stored.start, dtype).to(device)
        start = stored.start + index * (stored.nbytes // shape[0])
        return _load_payload(name, stored, shape[1:], start, dtype).to(device)

    def stored(self, name: str) -> StoredTensor | None:
        """Return what the files say of the tensor ``name``; None: there is no such tensor."""
        return self._tensors.get(name)

    def error(self, name: str, problem: str) -> CheckpointError:
        """Make the error about the tensor ``name``, for the caller to raise."""
        return CheckpointError(self._tensors[name].file.name, problem, tensor=name)

    def _find(
        self, name: str, shape: tuple[int, ...], dtypes: Iterable[str] = _STORED_DTYPES
    ) -> StoredTensor:
        stored = self._tensors.get(name)
        if stored is None:
            raise CheckpointError(
                str(self.directory), "is missing from the checkpoint", tensor=name
            )
        if stored.shape != shape:
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


def _load(
    name: str,
    stored: StoredTensor,
    shape: tuple[int, ...],
    start: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    payload = _load_payload(name, stored, shape, start, _STORED_DTYPES[stored.dtype])
    loaded = payload.to(device=device, dtype=dtype)
    _require_finite(loaded, stored, name)
    return loaded


def _load_payload(
    name: str,
    stored: StoredTensor,
    shape: tuple[int, ...],
    start: int,
    dtype: torch.dtype,
) -> Tensor:
    payload = torch.empty(shape, dtype=dtype)
    buffer = memoryview(payload.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]  # numpy's stubs hide the buffer
    try:
        with stored.file.open("rb", buffering=0) as file:
            if Stamp.of(os.fstat(file.fileno())) != stored.stamp:
                raise CheckpointError(
                    stored.file.name,
                    "has changed while in use: start this process anew",
                    tensor=name,
                )
            file.seek(start)
            filled = 0
            while filled < buffer.nbytes:  # one read returns at most 2 GiB
                count = file.readinto(buffer[filled:])
                if not count:
                    raise CheckpointError(
                        stored.file.name, "has become shorter while in use", tensor=name
                    )
                filled += count
    except OSError as error:
        raise CheckpointError(stored.file.name, f"cannot be read: {error}", tensor=name) from error
    return payload


def _require_finite(loaded: Tensor, stored: StoredTensor, name: str) -> None:
    """Raise ``CheckpointError`` for infinities and NaN, stored so or made so by ``dtype``."""
    if not loaded.numel():
        return
    if not bool(torch.stack(loaded.aminmax()).isfinite().all()):
        number = int((~loaded.isfinite()).sum())
        raise CheckpointError(
            stored.file.name,
            f"{number} of {loaded.numel()} weights are infinite or no number as {loaded.dtype}: the "
            "file is damaged or not made for this dtype",
            tensor=name,
        )
