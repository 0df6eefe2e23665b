"""Read single tensors, or slices of them, from a model directory's safetensors files."""

from pathlib import Path

import torch
from torch import Tensor

from moesaic.errors import CheckpointError
from moesaic.models.weight_files import StoredTensor, list_tensors

_STORED_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


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
                tensor that is not in the shard where the index says it is.
        """
        self.directory = directory
        self._tensors = list_tensors(directory)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def read(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """The tensor ``name`` as ``dtype`` on ``device``.

        Raises:
            CheckpointError: there is no such tensor, its shape is not ``shape``, or its payload
                cannot be read.
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
        """Entry ``index`` along the first axis of the tensor ``name``, whose whole shape is
        ``shape``.

        Raises:
            CheckpointError: as for ``read``.
        """
        stored = self._find(name, shape)
        stride = stored.nbytes // shape[0]
        return _load(name, stored, shape[1:], stored.start + index * stride, dtype, device)

    def _find(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
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
        if stored.dtype not in _STORED_DTYPES:
            raise CheckpointError(
                stored.file.name,
                f"expected one of {', '.join(_STORED_DTYPES)}, found {stored.dtype}",
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
    payload = torch.empty(shape, dtype=_STORED_DTYPES[stored.dtype])
    buffer = memoryview(payload.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    try:
        with stored.file.open("rb", buffering=0) as file:
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
    return payload.to(device=device, dtype=dtype)
