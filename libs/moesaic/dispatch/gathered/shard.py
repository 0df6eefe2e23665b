"""The share of the experts that one worker has, packed: in memory, or in a file."""

import hashlib
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import structlog
import torch
from torch import Tensor

from moesaic.dispatch.gathered.plan import StreamPlan
from moesaic.dispatch.loading.experts import LoadedExpert
from moesaic.errors import ExpertUnavailable, InvalidInput
from moesaic.kernels.expert_layout import ExpertLayout
from moesaic.models.checkpoint import Checkpoint
from moesaic.models.config import ModelConfig
from moesaic.models.experts import load_expert

log = structlog.get_logger()


class PackedExperts:
    """Reads experts from a checkpoint and packs them. Computes: not for threads that stay."""

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig, layout: ExpertLayout) -> None:
        self._checkpoint, self._config, self.layout = checkpoint, config, layout

    def pack(self, layer: int, experts: Sequence[int], rows: Sequence[Tensor]) -> None:
        """Fill ``rows``, uint8 ``[nbytes]`` each, with ``experts``.

        Raises:
            CheckpointError: a tensor is missing, mis-shaped or cannot be read.
        """
        for expert, row in zip(experts, rows, strict=True):
            read = load_expert(
                self._checkpoint,
                self._config,
                layer,
                expert,
                self.layout.dtype,
                torch.device("cpu"),
            )
            self.layout.pack(read.gate_up, read.down, row)

    def packed(self, layer: int, experts: Sequence[int]) -> Tensor:
        """The same, as uint8 ``[n, nbytes]``."""
        rows = torch.empty(len(experts), self.layout.nbytes, dtype=torch.uint8)
        self.pack(layer, experts, list(rows))
        return rows


class Part(NamedTuple):
    """Some bytes of a shard."""

    packed: Tensor  # uint8 [n]; may be the shard's own memory
    digest: int = (
        0  # of the whole expert that they are of, as it was read; 0: of several, or unknown
    )


class Shard(Protocol):
    """A worker's share of every layer that it gives, expert after expert, as bytes."""

    def read(self, layer: int, start: int, length: int) -> Part:
        """``length`` bytes from ``start``."""
        ...

    def read_into(self, layer: int, start: int, into: Tensor) -> None:
        """Copy as many bytes as ``into``, uint8 ``[n]``, has."""
        ...


class MemoryShard:
    """A share in memory."""

    def __init__(self, rows: Mapping[int, Tensor]) -> None:
        """Take uint8 ``[n, nbytes]`` by layer."""
        self.rows = rows

    @classmethod
    def load(cls, plan: StreamPlan, source: PackedExperts) -> "MemoryShard":
        """Read what stays in memory.

        Raises:
            CheckpointError: see ``PackedExperts.pack``.
        """
        return cls({lay: source.packed(lay, plan.in_memory) for lay in plan.streamed_layers})

    def read(self, layer: int, start: int, length: int) -> Part:
        """See ``Shard.read``."""
        return Part(self.rows[layer].view(-1)[start : start + length])

    def read_into(self, layer: int, start: int, into: Tensor) -> None:
        """See ``Shard.read_into``."""
        into.numpy()[:] = self.read(layer, start, len(into)).packed.numpy()


class SlotShard:
    """The slots of an expert worker: whatever a placement has put there, as the same bytes."""

    def __init__(self, find: Callable[[int, int], LoadedExpert | None], row_bytes: int) -> None:
        """``find`` gives an expert of a layer, of ``row_bytes``, if it is here; from any thread."""
        self._find, self._row_bytes = find, row_bytes

    def read(self, layer: int, start: int, length: int) -> Part:
        """See ``Shard.read``; a copy only if it is of several experts.

        Raises:
            ExpertUnavailable: an expert is not here, or no longer.
        """
        expert, offset = divmod(start, self._row_bytes)
        if offset + length <= self._row_bytes:
            packed, digest = self._expert(layer, expert)
            return Part(packed[offset : offset + length], digest)
        copied = torch.empty(length, dtype=torch.uint8)
        self.read_into(layer, start, copied)
        return Part(copied)

    def read_into(self, layer: int, start: int, into: Tensor) -> None:
        """See ``Shard.read_into``, and ``read``."""
        done, to = 0, into.numpy()  # torch would copy with a team of threads, and keep it
        while done < len(to):
            expert, offset = divmod(start + done, self._row_bytes)
            part = self._expert(layer, expert).packed[offset : offset + len(to) - done].numpy()
            to[done : done + len(part)] = part
            done += len(part)

    def _expert(self, layer: int, expert: int) -> Part:
        held = self._find(layer, expert)
        if held is None or held.packed is None:
            raise ExpertUnavailable(layer, cause=f"expert {expert} is in no slot here")
        return Part(held.packed, held.digest)


class FileShard:
    """A share in a file: what is not being computed takes none of this process's memory.

    It is read, not mapped: mapped pages count as the process's own, and would be fetched one by one
    by the thread that computes.
    """

    def __init__(self, path: Path, plan: StreamPlan) -> None:
        """Open a file that ``made`` has made."""
        self._file = path.open("rb", buffering=0)
        held = len(plan.share.experts(plan.num_experts))
        self._starts = {
            layer: idx * held * plan.expert_bytes for idx, layer in enumerate(plan.streamed_layers)
        }

    def read(self, layer: int, start: int, length: int) -> Part:
        """See ``Shard.read``; a copy."""
        copied = torch.empty(length, dtype=torch.uint8)
        self.read_into(layer, start, copied)
        return Part(copied)

    def read_into(self, layer: int, start: int, into: Tensor) -> None:
        """See ``Shard.read_into``."""
        start += self._starts[layer]
        view = memoryview(into.numpy())  # type: ignore[arg-type]
        done = 0
        while done < view.nbytes:  # one read returns at most 2 GiB
            count = os.preadv(self._file.fileno(), [view[done:]], start + done)
            if not count:
                raise OSError(f"{self._file.name} has become shorter while in use")
            done += count

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def shard_file(directory: Path, plan: StreamPlan, source: PackedExperts, digest: str) -> Path:
    """The file of this worker's share, made now if it never was; it appears whole or not at all.

    Its name says what is in it, so no process ever reads another model's or processor's.

    Raises:
        InvalidInput: the directory cannot be written, or has too little room.
        CheckpointError: see ``PackedExperts.pack``.
    """
    identity = f"{digest}|{source.layout.name}|{plan.streamed_layers}|{plan.share}"
    name = f"experts-{hashlib.sha256(identity.encode()).hexdigest()[:32]}.packed"
    path = directory / name
    try:
        if path.exists() and path.stat().st_size == plan.file_bytes:
            return path
        directory.mkdir(parents=True, exist_ok=True)
        log.info("shard.packing", file=str(path), bytes=plan.file_bytes)
        with tempfile.NamedTemporaryFile(dir=directory, delete=False) as file:
            try:
                os.posix_fallocate(file.fileno(), 0, max(1, plan.file_bytes))
                for layer in plan.streamed_layers:
                    for expert in plan.share.experts(plan.num_experts):
                        file.write(source.packed(layer, [expert]).numpy().tobytes())
                file.flush()
                os.fsync(file.fileno())
                os.replace(file.name, path)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise
    except OSError as error:
        raise InvalidInput(
            "offload_dir", f"cannot keep {plan.file_bytes} bytes in {directory}: {error}"
        ) from error
    return path
