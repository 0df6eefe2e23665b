"""Where the experts of a layer come from: peers, a file, or the checkpoint.

Whatever runs here on threads that stay only copies. Computing, with torch above all, would give each
such thread its own pool of OpenMP's threads.
"""

import asyncio
import itertools
from concurrent.futures import Executor
from typing import Protocol

import torch
from torch import Tensor

from moesaic.dispatch.gathered.pieces import is_as_digested, pieces_of
from moesaic.dispatch.gathered.plan import PULLS_AHEAD, Runs, Share, StreamPlan, rows_of
from moesaic.dispatch.gathered.shard import PackedExperts, Shard
from moesaic.errors import ExpertUnavailable, InvalidInput, MoesaicError, PeerLost
from moesaic.kernels.own_thread import on_own_thread
from moesaic.transport.contract import Link, Network
from moesaic.transport.frame import Frame, FrameKind


class DamagedExpert(MoesaicError):
    """A peer gave bytes that are not those that it has read."""

    code = "damaged_expert"

    def __init__(self, peer: str, layer: int, row: int) -> None:
        self.peer, self.layer, self.row = peer, layer, row
        super().__init__(f"{peer}: row {row} of layer {layer} is damaged: its digest differs")


class Source(Protocol):
    """Brings experts of one share, layers in the order in which they were asked for."""

    async def bring(self, layer: int, runs: Runs, into: Tensor) -> None:
        """Copy ``runs`` of the layer's share to the same places of ``into``, uint8 ``[bytes]``.

        Raises:
            MoesaicError: it cannot, or can no longer; some bytes may be there.
        """
        ...


class FromShard:
    """The own share, read beside the event loop."""

    def __init__(self, shard: Shard, executor: Executor) -> None:
        self._shard, self._executor = shard, executor

    async def bring(self, layer: int, runs: Runs, into: Tensor) -> None:
        """See ``Source``."""
        loop = asyncio.get_running_loop()
        for start, length in runs:
            part = into[start : start + length]
            await loop.run_in_executor(self._executor, self._shard.read_into, layer, start, part)


class FromCheckpoint:
    """A share that nobody holds now: read and packed anew, slowly."""

    def __init__(self, share: Share, plan: StreamPlan, packed: PackedExperts) -> None:
        self._experts, self._packed = share.experts(plan.num_experts), packed
        self._row_bytes = plan.expert_bytes
        self._turn = asyncio.Lock()

    async def bring(self, layer: int, runs: Runs, into: Tensor) -> None:
        """See ``Source``."""
        rows, by_row = rows_of(runs, self._row_bytes), into.view(-1, self._row_bytes)
        experts = [self._experts[row] for row in rows]
        async with self._turn:
            await on_own_thread(self._packed.pack, layer, experts, [by_row[row] for row in rows])


class FromPeer:
    """A share that a peer holds: asked for in messages of ``PULL_BYTES``, a few at a time.

    Messages are received into memory of their own and copied: one that comes late must never write
    to experts that are being computed with. The copy takes 3 to 5 % of a message's way.
    """

    def __init__(
        self,
        network: Network,
        link: Link,
        digest: int,
        row_bytes: int,
        timeout_s: float,
        turns: asyncio.Semaphore | None = None,
    ) -> None:
        """
        Args:
            network: of the link.
            link: to the peer.
            digest: which bytes are meant, see ``Holder``.
            row_bytes: of one packed expert.
            timeout_s: for one message.
            turns: messages that may be under way, shared with other peers; by default some of its own.
        """
        self.link, self.usable = link, True
        self._network, self._digest, self._timeout_s = network, digest, timeout_s
        self._row_bytes = row_bytes
        self._turns = turns or asyncio.Semaphore(PULLS_AHEAD)
        self._seq = itertools.count(1)

    async def bring(self, layer: int, runs: Runs, into: Tensor) -> None:
        """See ``Source``."""
        pulls = [self.pull(layer, start, into[start : start + length]) for start, length in runs]
        outcomes = await asyncio.gather(*pulls, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    def failed(self, error: BaseException) -> None:
        """Draw the consequence of what ``bring`` raised: who means other bytes, or has damaged ones,
        always will; who has some experts no longer may have others; whatever else has failed is dialled
        anew."""
        if isinstance(error, InvalidInput | DamagedExpert):
            self.usable = False
        elif not isinstance(error, ExpertUnavailable):
            self.link.discard("a pull failed")

    async def pull(self, layer: int, start: int, into: Tensor) -> Tensor:
        """Fill ``into``, uint8 of at most ``PULL_BYTES``, with whole pieces from ``start`` of the share.

        Returns:
            The digests that they have, int64 ``[pieces]``, see ``pieces``.

        Raises:
            DamagedExpert: they are not what the peer read; ``into`` is as it was.
            MoesaicError: they did not come; ``into`` is as it was.
        """
        pieces = pieces_of(start, len(into), self._row_bytes)
        assert pieces is not None
        async with self._turns:
            frame = Frame(
                kind=FrameKind.REQUEST,
                layer=layer,
                seq=next(self._seq),
                digest=self._digest,
                tensors=[torch.tensor([[start, len(into)]])],
            )
            [outcome] = await self._network.exchange([(self.link, frame)], self._timeout_s)
            if isinstance(outcome, MoesaicError):
                raise outcome
            shapes = [(tuple(t.shape), t.dtype) for t in outcome.tensors]
            if shapes != [((1, len(into) // 4), torch.int32), ((1, len(pieces)), torch.int64)]:
                self.link.discard("its experts have another size")
                raise PeerLost(self.link.peer, "its experts have another size")
            packed, digests = outcome.tensors[0][0].view(torch.uint8), outcome.tensors[1][0]
            if not is_as_digested(packed, start, self._row_bytes, digests):
                raise DamagedExpert(self.link.peer, layer, start // self._row_bytes)
            into.numpy()[:] = packed.numpy()
            return digests.clone()
