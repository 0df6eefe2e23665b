# Ranks of one attention instance: the first leads, the others compute their parts of what it tells them.
#   Way        gloo for tensors of CPUs, NCCL for those of GPUs: torch.distributed chooses by the tensor.
#   Message    one broadcast of FRAME bytes: eight numbers, and behind them what is told if it fits; else
#              a second one. Sums and parts come back by reduce and gather.
#   Cost       a small message and its sum take some 100 microseconds between two processes on CPUs.
"""The group of ranks of one attention instance."""

import datetime
import hashlib
from collections.abc import Callable
from enum import IntEnum
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]  # torch's list of names lacks it

from moesaic.models.tensor_parallel.contents import as_bytes, from_bytes

LEADER = 0
_NUMBERS = 8  # int64, at the head of every message
_INLINE_BYTES = 1 << 14
_FRAME_BYTES = 8 * _NUMBERS + _INLINE_BYTES
# Followers wait for the next step, and nobody knows when it comes; a lost rank closes its connections. gloo can miss
# that where it begins to send just then, and waits: so the ranks of a machine are watched as processes, and those of
# several by calls that end with them.
_PATIENCE = datetime.timedelta(days=300)
JOIN_PATIENCE = datetime.timedelta(minutes=30)


class RankMessage(IntEnum):
    """The kinds of what the first rank tells the others."""

    END = 0
    CACHE = 1  # there is a new KV cache
    FORGET = 2  # a KV cache is gone
    COPY = 3  # blocks of a KV cache are copied
    PLAN = 4  # of the steps that follow
    ATTEND = 5
    MLP = 6  # of a dense layer, or of a shared expert
    HEAD = 7
    STEPS = 8  # steps over a KV cache are to be captured
    CAPTURE = 9  # they are, of one size
    STEP = 10  # one of them, by its graphs: no other message belongs to it


class RankGroup:
    """This rank's place among all of its instance. Not safe for several threads at a time.

    Attributes:
        releases: called before the ranks part, to free graphs that have operations of the group.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        store: Store,
        device: torch.device,
        lost: Callable[[Exception], NoReturn],
    ) -> None:
        """Meet the other ranks; waits for them.

        Args:
            rank: rank of this process; 0 leads.
            ranks: number of ranks of the instance.
            store: store that only the ranks of the instance share.
            device: device that computes here.
            lost: called if another rank is gone; does not return.

        Raises:
            RuntimeError: they have not come.
        """
        self.rank, self.ranks, self.device, self.lose = rank, ranks, device, lost
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=ranks, timeout=_PATIENCE
        )
        self.releases: list[Callable[[], None]] = []
        self._frame = torch.zeros(_FRAME_BYTES, dtype=torch.uint8)
        self._numbers = self._frame[: 8 * _NUMBERS].view(torch.int64)

    @property
    def leads(self) -> bool:
        """True for the first rank."""
        return self.rank == LEADER

    def tell(self, kind: RankMessage, first: int, second: int, content: Tensor) -> None:
        """Tell the other ranks something; of the first rank.

        Args:
            kind: kind of the message.
            first: a number, with a meaning by kind.
            second: another number.
            content: tensor of one or two dimensions, on any device.
        """
        content = content.contiguous()
        shape = (*content.shape, 0)[:2]
        inline = content.device.type == "cpu" and content.nbytes <= _INLINE_BYTES
        numbers = (kind, first, second, *shape, content.dim(), content.nbytes, inline)
        self._numbers.copy_(torch.tensor(numbers))
        if inline and content.nbytes:
            body = self._frame[8 * _NUMBERS : 8 * _NUMBERS + content.nbytes]
            body.copy_(as_bytes(content))
        self._run(lambda: dist.broadcast(self._frame, LEADER))
        if not inline:
            self.spread(content)

    def hear(
        self, dtypes: Callable[[RankMessage], tuple[torch.dtype, torch.device]]
    ) -> tuple[RankMessage, int, int, Tensor]:
        """Wait for what the first rank tells next; of the others.

        Args:
            dtypes: gives the type and the device of what a kind of message has.

        Returns:
            Kind, numbers and content, which is this caller's own.
        """
        self._run(lambda: dist.broadcast(self._frame, LEADER))
        kind, first, second, rows, width, dimensions, nbytes, inline = self._numbers.tolist()
        dtype, device = dtypes(RankMessage(kind))
        shape = (rows, width)[:dimensions]
        if inline:
            body = self._frame[8 * _NUMBERS : 8 * _NUMBERS + nbytes].clone()
            return RankMessage(kind), first, second, from_bytes(body, dtype, shape).to(device)
        content = torch.empty(shape, dtype=dtype, device=device)
        return RankMessage(kind), first, second, self.spread(content)

    def spread(self, rows: Tensor) -> Tensor:
        """Give all ranks the rows of the first one; the others have a tensor of the same form for them."""
        rows = rows.contiguous()
        self._run(lambda: dist.broadcast(rows, LEADER))
        return rows

    def agree(self, what: str) -> bool:
        """Return true, in the first rank, if all have said the same; false elsewhere is of no use."""
        digest = hashlib.sha256(what.encode()).digest()
        said = self.side_by_side(torch.frombuffer(bytearray(digest), dtype=torch.int64)[None])
        return torch.equal(said, said[:, : len(digest) // 8].repeat(1, self.ranks))

    def sum(self, part: Tensor) -> Tensor:
        """Add up the parts of all ranks, in the first one.

        Returns:
            The sum there, and something of no use elsewhere; ``part`` may be changed.
        """
        part = part.contiguous()
        self._run(lambda: dist.reduce(part, LEADER))
        return part

    def side_by_side(self, part: Tensor) -> Tensor:
        """Bring the parts of all ranks, ``[R, n]`` each, side by side in the first one.

        Returns:
            ``[R, n * ranks]`` there, and ``part`` elsewhere.
        """
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.ranks)] if self.leads else None
        self._run(lambda: dist.gather(part, parts, LEADER))
        return torch.cat(parts, dim=1) if parts else part

    def close(self) -> None:
        """Leave the group; the first rank lets the others end."""
        try:
            if self.leads:
                self.tell(RankMessage.END, 0, 0, torch.zeros(0, dtype=torch.uint8))
        finally:
            for release in self.releases:
                release()
            dist.destroy_process_group()

    def _run(self, collective: Callable[[], object]) -> None:
        try:
            collective()
        except RuntimeError as error:  # torch's for all that goes wrong between ranks
            self.lose(error)
