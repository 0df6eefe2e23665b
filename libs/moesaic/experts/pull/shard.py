"""The share of the experts that one worker gives to others, packed, in memory."""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from moesaic.errors import ExpertUnavailable
from moesaic.experts.loaded import ExpertFiles, LoadedExpert
from moesaic.experts.pieces import digests_of, num_pieces, pieces_of
from moesaic.experts.pull.ranges import HeldShare


class Shard(Protocol):
    """A worker's share of every layer that it gives, expert after expert, as bytes."""

    def read(self, layer: int, start: int, length: int) -> Tensor:
        """``length`` bytes from ``start``, uint8 ``[length]``; may be the shard's own memory."""
        ...

    def digests(self, layer: int, start: int, length: int) -> Tensor:
        """Digests of these bytes from when they were read from the checkpoint, int64 ``[pieces]``.

        Returns:
            Nothing if the bytes are not whole pieces, see ``pieces``.
        """
        ...

    def read_into(self, layer: int, start: int, into: Tensor) -> None:
        """Fill ``into``, uint8 ``[n]``, with the bytes from ``start``."""
        ...


class MemoryShard:
    """A share in memory."""

    def __init__(self, rows: Mapping[int, Tensor]) -> None:
        """Give ``rows``, uint8 ``[n, nbytes]`` by layer."""
        self.rows = rows
        self._digests = {layer: digests_of(held) for layer, held in rows.items()}

    @classmethod
    def load(cls, held: HeldShare, source: ExpertFiles) -> "MemoryShard":
        """Read a share into memory.

        Raises:
            CheckpointError: see ``ExpertFiles.pack``.
        """
        return cls({layer: source.packed(layer, held.experts) for layer in held.layers})

    def read(self, layer: int, start: int, length: int) -> Tensor:
        """See ``Shard.read``."""
        return self.rows[layer].view(-1)[start : start + length]

    def digests(self, layer: int, start: int, length: int) -> Tensor:
        """See ``Shard.digests``."""
        return chosen_digests(
            self._digests[layer], pieces_of(start, length, self.rows[layer].shape[1])
        )

    def read_into(self, layer: int, start: int, into: Tensor) -> None:
        """See ``Shard.read_into``."""
        into.numpy()[:] = self.read(layer, start, len(into)).numpy()


class SlotShard:
    """The experts in the slots of an expert worker, as the same bytes."""

    def __init__(self, find: Callable[[int, int], LoadedExpert | None], row_bytes: int) -> None:
        """``find`` gives an expert of a layer, of ``row_bytes``, if it is here; from any thread."""
        self._find, self._row_bytes = find, row_bytes

    def read(self, layer: int, start: int, length: int) -> Tensor:
        """See ``Shard.read``; a copy if it is of several experts.

        Raises:
            ExpertUnavailable: an expert is not here, or no longer.
        """
        expert, offset = divmod(start, self._row_bytes)
        first = self._expert(layer, expert).packed
        if offset + length <= self._row_bytes:
            return first[offset : offset + length]
        if first.is_cuda:
            return torch.cat(list(self._parts(layer, start, length)))
        copied = torch.empty(length, dtype=torch.uint8)
        self.read_into(layer, start, copied)
        return copied

    def digests(self, layer: int, start: int, length: int) -> Tensor:
        """See ``Shard.digests``, and ``read``."""
        pieces, each = pieces_of(start, length, self._row_bytes), num_pieces(self._row_bytes)
        if pieces is None:
            return chosen_digests(torch.empty(0, dtype=torch.int64), None)
        first = pieces.start // each
        experts = range(first, (pieces.stop - 1) // each + 1)
        held = torch.cat([self._expert(layer, expert).digests for expert in experts])
        return held[pieces.start - first * each : pieces.stop - first * each]

    def read_into(self, layer: int, start: int, into: Tensor) -> None:
        """See ``Shard.read_into``, and ``read``."""
        # Torch would copy with a team of threads, and keep it.
        done, to = 0, into.numpy()
        for part in self._parts(layer, start, len(into)):
            to[done : done + len(part)] = part.numpy(force=True)
            done += len(part)

    def _parts(self, layer: int, start: int, length: int) -> Iterator[Tensor]:
        """``length`` bytes from ``start``, expert by expert."""
        done = 0
        while done < length:
            expert, offset = divmod(start + done, self._row_bytes)
            part = self._expert(layer, expert).packed[offset : offset + length - done]
            yield part
            done += len(part)

    def _expert(self, layer: int, expert: int) -> "_Held":
        held = self._find(layer, expert)
        if held is None or held.packed is None or held.digests is None:
            raise ExpertUnavailable(layer, cause=f"expert {expert} is in no slot here")
        return _Held(held.packed, held.digests)


class _Held(NamedTuple):
    packed: Tensor  # uint8 [nbytes]
    digests: Tensor  # int64 [pieces]


def chosen_digests(digests: Tensor, pieces: range | None) -> Tensor:
    """The digests of some pieces; none if ``pieces`` is ``None``."""
    return digests.view(-1)[slice(0) if pieces is None else slice(pieces.start, pieces.stop)]
