"""The asking side of all pulls of experts."""

import asyncio
import itertools

import torch
from torch import Tensor

from moesaic.errors import ExpertUnavailable, InvalidInput, MoesaicError, PeerLost
from moesaic.experts.pieces import is_as_digested, pieces_of
from moesaic.experts.pull import frames
from moesaic.experts.pull.ranges import PULLS_AHEAD, Runs
from moesaic.transport.contract import Link, Network
from moesaic.transport.device_memory import begin_to_host, settle


class DamagedExpert(MoesaicError):
    """A peer gave other bytes than it had read from the checkpoint."""

    code = "damaged_expert"

    def __init__(self, peer: str, layer: int, row: int) -> None:
        self.peer, self.layer, self.row = peer, layer, row
        super().__init__(f"{peer}: row {row} of layer {layer} is damaged: its digest differs")


class PullClient:
    """Asks one peer for a share, in messages of ``PULL_BYTES``, a few at a time.

    Messages are received into memory of their own and copied: a late one must never write to
    experts that are being computed with. The copy takes 3 to 5 % of a message's way.

    Bytes that arrive on a GPU are checked as all others are: a copy of them, made from where they have
    arrived, is digested on the host. So what is compared has been on the GPU, but only the copy on it
    from there to ``into`` is not compared again. It takes two waits a message, on a thread of its own.
    """

    def __init__(
        self,
        network: Network,
        link: Link,
        contents: int,
        row_bytes: int,
        timeout_s: float,
    ) -> None:
        """
        Args:
            network: network of the link.
            link: to the peer.
            contents: the bytes that are meant, see ``frames.contents_digest``.
            row_bytes: bytes of one packed expert.
            timeout_s: time limit of one message.
        """
        self.link, self.usable = link, True
        self._network, self._contents, self._timeout_s = network, contents, timeout_s
        self._row_bytes = row_bytes
        self._turns = asyncio.Semaphore(PULLS_AHEAD)
        self._seq = itertools.count(1)

    async def bring(self, layer: int, runs: Runs, into: Tensor) -> None:
        """Copy ``runs`` of the layer's share to the same places of ``into``, uint8 ``[bytes]``.

        Raises:
            DamagedExpert: some bytes are not as the peer read them.
            MoesaicError: some did not come; others may be there.
        """
        await self.pull_all(layer, runs, into)

    async def pull_all(self, layer: int, runs: Runs, into: Tensor, first: int = 0) -> list[Tensor]:
        """Copy as ``bring`` does, from byte ``first`` of the share on.

        Returns:
            The digests of each run's pieces, see ``pull``.
        """
        pulls = [self.pull(layer, first + at, into[at : at + length]) for at, length in runs]
        outcomes = await asyncio.gather(*pulls, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return [outcome for outcome in outcomes if isinstance(outcome, Tensor)]

    def failed(self, error: BaseException) -> None:
        """Draw the consequence of an error that ``bring`` raised.

        | error | consequence |
        |---|---|
        | ``InvalidInput`` | not used again: the peer means other bytes |
        | ``DamagedExpert`` | not used again: its memory is damaged |
        | ``ExpertUnavailable`` | none: the peer may have other experts |
        | any other | the link ends, to be dialled anew |
        """
        if isinstance(error, InvalidInput | DamagedExpert):
            self.usable = False
        elif not isinstance(error, ExpertUnavailable):
            self.link.discard("a pull failed")

    async def pull(self, layer: int, start: int, into: Tensor) -> Tensor:
        """Fill ``into``, uint8 of at most ``PULL_BYTES``, with whole pieces from ``start`` of the share.

        Returns:
            The digests of the pieces, int64 ``[pieces]``, see ``pieces``.

        Raises:
            DamagedExpert: they are not as the peer read them; ``into`` is as it was.
            MoesaicError: they did not come; ``into`` is as it was.
        """
        pieces = pieces_of(start, len(into), self._row_bytes)
        assert pieces is not None
        async with self._turns:
            frame = frames.pull_request(layer, next(self._seq), start, len(into), self._contents)
            [outcome] = await self._network.exchange([(self.link, frame)], self._timeout_s)
            if isinstance(outcome, MoesaicError):
                raise outcome
            found = frames.pulled(outcome, len(into), len(pieces))
            if found is None:
                self.link.discard("its experts have another size")
                raise PeerLost(self.link.peer, "its experts have another size")
            packed, digests = found
            seen = begin_to_host(packed)
            settle(packed.device)
            if not is_as_digested(seen, start, self._row_bytes, digests):
                raise DamagedExpert(self.link.peer, layer, start // self._row_bytes)
            _copy(packed, into)
            return digests.clone()


def _copy(packed: Tensor, into: Tensor) -> None:
    """Copy bytes, wherever both are; done when this returns."""
    if packed.device == into.device == torch.device("cpu"):
        # Torch would copy with a team of threads, and keep it.
        into.numpy()[:] = packed.numpy()
        return
    into.copy_(packed)
    # Kernels of another thread will compute with it.
    settle(into.device)
