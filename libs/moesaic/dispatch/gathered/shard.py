"""The share of the experts that one worker has, packed: in memory, or in a file."""

import hashlib
import itertools
import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple, Protocol

import numpy as np
import structlog
import torch
from torch import Tensor

from moesaic.dispatch.gathered.pieces import digests_of, num_pieces, pieces_of
from moesaic.dispatch.gathered.plan import StreamPlan
from moesaic.dispatch.loading.experts import LoadedExpert
from moesaic.errors import ExpertUnavailable, InvalidInput
from moesaic.kernels.expert_layout import ExpertLayout
from moesaic.models.checkpoint import Checkpoint
from moesaic.models.config import ModelConfig
from moesaic.models.experts import load_expert
from moesaic.models.weights_digest import file_digest, remembered_digest

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


class Shard(Protocol):
    """A worker's share of every layer that it gives, expert after expert, as bytes."""

    def read(self, layer: int, start: int, length: int) -> Tensor:
        """``length`` bytes from ``start``, uint8 ``[length]``; may be the shard's own memory."""
        ...

    def digests(self, layer: int, start: int, length: int) -> Tensor:
        """Those of the same bytes when they were read from the checkpoint, int64 ``[pieces]``, see
        ``pieces``; none if they are not whole pieces."""
        ...

    def read_into(self, layer: int, start: int, into: Tensor) -> None:
        """Copy as many bytes as ``into``, uint8 ``[n]``, has."""
        ...


class MemoryShard:
    """A share in memory."""

    def __init__(self, rows: Mapping[int, Tensor]) -> None:
        """Take uint8 ``[n, nbytes]`` by layer; of other layers there is nothing."""
        self.rows = rows
        self._digests = {layer: digests_of(held) for layer, held in rows.items()}

    @classmethod
    def load(cls, plan: StreamPlan, source: PackedExperts) -> "MemoryShard":
        """Read what stays in memory.

        Raises:
            CheckpointError: see ``PackedExperts.pack``.
        """
        return cls({lay: source.packed(lay, plan.in_memory) for lay in plan.streamed_layers})

    def read(self, layer: int, start: int, length: int) -> Tensor:
        """See ``Shard.read``."""
        return self.rows[layer].view(-1)[start : start + length]

    def digests(self, layer: int, start: int, length: int) -> Tensor:
        """See ``Shard.digests``."""
        return _some(self._digests[layer], pieces_of(start, length, self.rows[layer].shape[1]))

    def read_into(self, layer: int, start: int, into: Tensor) -> None:
        """See ``Shard.read_into``."""
        into.numpy()[:] = self.read(layer, start, len(into)).numpy()


class SlotShard:
    """The slots of an expert worker: whatever a placement has put there, as the same bytes."""

    def __init__(self, find: Callable[[int, int], LoadedExpert | None], row_bytes: int) -> None:
        """``find`` gives an expert of a layer, of ``row_bytes``, if it is here; from any thread."""
        self._find, self._row_bytes = find, row_bytes

    def read(self, layer: int, start: int, length: int) -> Tensor:
        """See ``Shard.read``; a copy only if it is of several experts.

        Raises:
            ExpertUnavailable: an expert is not here, or no longer.
        """
        expert, offset = divmod(start, self._row_bytes)
        if offset + length <= self._row_bytes:
            return self._expert(layer, expert).packed[offset : offset + length]
        copied = torch.empty(length, dtype=torch.uint8)
        self.read_into(layer, start, copied)
        return copied

    def digests(self, layer: int, start: int, length: int) -> Tensor:
        """See ``Shard.digests``, and ``read``."""
        pieces, each = pieces_of(start, length, self._row_bytes), num_pieces(self._row_bytes)
        if pieces is None:
            return _some(torch.empty(0, dtype=torch.int64), None)
        first = pieces.start // each
        experts = range(first, (pieces.stop - 1) // each + 1)
        held = torch.cat([self._expert(layer, expert).digests for expert in experts])
        return held[pieces.start - first * each : pieces.stop - first * each]

    def read_into(self, layer: int, start: int, into: Tensor) -> None:
        """See ``Shard.read_into``, and ``read``."""
        done, to = 0, into.numpy()  # torch would copy with a team of threads, and keep it
        while done < len(to):
            expert, offset = divmod(start + done, self._row_bytes)
            part = self._expert(layer, expert).packed[offset : offset + len(to) - done].numpy()
            to[done : done + len(part)] = part
            done += len(part)

    def _expert(self, layer: int, expert: int) -> "_Held":
        held = self._find(layer, expert)
        if held is None or held.packed is None or held.digests is None:
            raise ExpertUnavailable(layer, cause=f"expert {expert} is in no slot here")
        return _Held(held.packed, held.digests)


class _Held(NamedTuple):
    packed: Tensor  # uint8 [nbytes]
    digests: Tensor  # int64 [pieces]


class FileShard:
    """A share in a file: what is not being computed takes none of this process's memory.

    It is read, not mapped: mapped pages count as the process's own, and would be fetched one by one
    by the thread that computes.
    """

    def __init__(self, path: Path, plan: StreamPlan) -> None:
        """Open a file that ``made`` has made."""
        self._file = path.open("rb", buffering=0)
        held, self._row_bytes = len(plan.share.experts(plan.num_experts)), plan.expert_bytes
        shape = len(plan.streamed_layers), held, num_pieces(plan.expert_bytes)
        stored = np.fromfile(_digests_beside(path), np.int64, math.prod(shape)).reshape(shape)
        self._digests = dict(zip(plan.streamed_layers, torch.from_numpy(stored), strict=True))
        self._starts = {
            layer: idx * held * plan.expert_bytes for idx, layer in enumerate(plan.streamed_layers)
        }

    def read(self, layer: int, start: int, length: int) -> Tensor:
        """See ``Shard.read``; a copy."""
        copied = torch.empty(length, dtype=torch.uint8)
        self.read_into(layer, start, copied)
        return copied

    def digests(self, layer: int, start: int, length: int) -> Tensor:
        """See ``Shard.digests``."""
        return _some(self._digests[layer], pieces_of(start, length, self._row_bytes))

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
        if path.exists() and path.stat().st_size == plan.file_bytes and _is_whole(path):
            return path
        directory.mkdir(parents=True, exist_ok=True)
        log.info("shard.packing", file=str(path), bytes=plan.file_bytes)
        with tempfile.NamedTemporaryFile(dir=directory, delete=False) as file:
            try:
                os.posix_fallocate(file.fileno(), 0, max(1, plan.file_bytes))
                digests = _write(file, plan, source)
                file.flush()
                os.fsync(file.fileno())
                whole = file_digest(Path(file.name))
                _keep(_digests_beside(path), digests, whole)
                os.replace(file.name, path)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise
    except OSError as error:
        raise InvalidInput(
            "offload_dir", f"cannot keep {plan.file_bytes} bytes in {directory}: {error}"
        ) from error
    return path


def _write(file: IO[bytes], plan: StreamPlan, source: PackedExperts) -> Tensor:
    """Write the experts of a share; returns their digests, int64 ``[n, pieces]``.

    All go through the same memory. What is kept of each, however little, would lie behind what was
    freed of it, which glibc could then not give back.
    """
    experts = plan.share.experts(plan.num_experts)
    found = torch.zeros(
        len(plan.streamed_layers) * len(experts), num_pieces(plan.expert_bytes), dtype=torch.int64
    )
    row = torch.empty(1, plan.expert_bytes, dtype=torch.uint8)
    for place, (layer, expert) in enumerate(itertools.product(plan.streamed_layers, experts)):
        source.pack(layer, [expert], [row[0]])
        file.write(row.numpy().data)
        found[place] = digests_of(row)[0]
    return found


def _digests_beside(path: Path) -> Path:
    """The file of the digests of a file of experts."""
    return path.with_suffix(".digests")


def _keep(path: Path, pieces: Tensor, whole: str) -> None:
    """Write the digests of a file's pieces, int64, and behind them that of all of it, in hex."""
    new = path.with_suffix(".new")
    new.write_bytes(pieces.numpy().tobytes() + whole.encode())
    os.replace(new, path)


def _is_whole(path: Path) -> bool:
    """Whether a file of experts is as it was made; what is damaged is made anew."""
    try:
        kept = _digests_beside(path).read_bytes()
        whole = remembered_digest(path)
    except OSError:
        return False
    if not kept.endswith(whole.encode()):
        log.warning("shard.damaged", file=str(path))
        return False
    return True


def _some(digests: Tensor, pieces: range | None) -> Tensor:
    """Those of some pieces; none if they were cut."""
    return digests.view(-1)[slice(0) if pieces is None else slice(pieces.start, pieces.stop)]
