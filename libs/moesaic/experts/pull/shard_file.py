"""The share of the experts that one worker has in a file."""

import hashlib
import itertools
import math
import os
import tempfile
from pathlib import Path
from typing import IO

import numpy as np
import structlog
import torch
from torch import Tensor

from moesaic.errors import InUse
from moesaic.experts.loaded import ExpertFiles
from moesaic.experts.pieces import digests_of, num_pieces, pieces_of
from moesaic.experts.pull.ranges import HeldShare
from moesaic.experts.pull.shard import chosen_digests
from moesaic.models.weights.digest import file_digest, remembered_digest

log = structlog.get_logger()


class FileShard:
    """A share in a file, so that only experts that are computed take this process's memory.

    The file is read, not mapped. Mapped pages would count as the process's own, and would come one
    by one, on the thread that computes.
    """

    def __init__(self, path: Path, share: HeldShare) -> None:
        """Open a file that ``shard_file`` has made."""
        self._file = path.open("rb", buffering=0)
        self._row_bytes = share.expert_bytes
        shape = len(share.layers), len(share.experts), num_pieces(share.expert_bytes)
        stored = np.fromfile(_digests_beside(path), np.int64, math.prod(shape)).reshape(shape)
        self._digests = dict(zip(share.layers, torch.from_numpy(stored), strict=True))
        self._starts = {layer: idx * share.layer_bytes for idx, layer in enumerate(share.layers)}

    def read(self, layer: int, start: int, length: int) -> Tensor:
        """See ``Shard.read``; a copy."""
        copied = torch.empty(length, dtype=torch.uint8)
        self.read_into(layer, start, copied)
        return copied

    def digests(self, layer: int, start: int, length: int) -> Tensor:
        """See ``Shard.digests``."""
        return chosen_digests(self._digests[layer], pieces_of(start, length, self._row_bytes))

    def read_into(self, layer: int, start: int, into: Tensor) -> None:
        """See ``Shard.read_into``."""
        start += self._starts[layer]
        view = memoryview(into.numpy())  # type: ignore[arg-type]  # numpy's stubs hide the buffer
        done = 0
        # One read returns at most 2 GiB.
        while done < view.nbytes:
            count = os.preadv(self._file.fileno(), [view[done:]], start + done)
            if not count:
                raise OSError(f"{self._file.name} has become shorter while in use")
            done += count

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def shard_file(directory: Path, share: HeldShare, source: ExpertFiles, digest: str) -> Path:
    """Make the file of this worker's share, unless it is there; it appears whole or not at all.

    Its name is derived from its contents, so no process reads another model's or processor's.

    Returns:
        The path of the file.

    Raises:
        InUse: the directory cannot be written, or has too little room.
        CheckpointError: see ``ExpertFiles.pack``.
    """
    identity = f"{digest}|{source.layout.name}|{share.layers}|{share.share}"
    name = f"experts-{hashlib.sha256(identity.encode()).hexdigest()[:32]}.packed"
    path = directory / name
    try:
        if path.exists() and path.stat().st_size == share.nbytes and _is_whole(path):
            return path
        directory.mkdir(parents=True, exist_ok=True)
        log.info("shard.packing", file=str(path), bytes=share.nbytes)
        with tempfile.NamedTemporaryFile(dir=directory, delete=False) as file:
            try:
                os.posix_fallocate(file.fileno(), 0, max(1, share.nbytes))
                digests = _write(file, share, source)
                file.flush()
                os.fsync(file.fileno())
                whole = file_digest(Path(file.name))
                _keep_digests(_digests_beside(path), digests, whole)
                os.replace(file.name, path)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise
    except OSError as error:
        raise InUse(
            "offload_dir", f"cannot keep {share.nbytes} bytes in {directory}: {error}"
        ) from error
    return path


def _write(file: IO[bytes], share: HeldShare, source: ExpertFiles) -> Tensor:
    """Write the experts of a share, all through the same memory.

    Memory of their own would be freed only in part: the digests kept of each would lie behind the
    freed rest, which glibc could then not give back.

    Returns:
        The digests, int64 ``[n, pieces]``.
    """
    num_experts, pieces = len(share.layers) * len(share.experts), num_pieces(share.expert_bytes)
    found = torch.zeros(num_experts, pieces, dtype=torch.int64)
    row = torch.empty(1, share.expert_bytes, dtype=torch.uint8)
    for place, (layer, expert) in enumerate(itertools.product(share.layers, share.experts)):
        source.pack(layer, [expert], [row[0]])
        file.write(row.numpy().data)
        found[place] = digests_of(row)[0]
    return found


def _digests_beside(path: Path) -> Path:
    """The file of the digests of a file of experts."""
    return path.with_suffix(".digests")


def _keep_digests(path: Path, pieces: Tensor, whole: str) -> None:
    """Write the digests of a file's pieces, int64, and then the whole file's, in hex."""
    new = path.with_suffix(".new")
    new.write_bytes(pieces.numpy().tobytes() + whole.encode())
    os.replace(new, path)


def _is_whole(path: Path) -> bool:
    """True if a file of experts is as it was made."""
    try:
        kept = _digests_beside(path).read_bytes()
        whole = remembered_digest(path)
    except OSError:
        return False
    if not kept.endswith(whole.encode()):
        log.warning("shard.damaged", file=str(path))
        return False
    return True
