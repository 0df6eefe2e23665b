"""Exchanges of plain layer requests without Python: the same sums as ``RoutedDispatcher`` makes itself.

One C function sends the rows to all workers of a layer, another waits and adds up. Whatever is not a
plain reply comes back to Python as a message, and the dispatcher settles the exchange as its own.
"""

import asyncio
import ctypes
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moesaic.dispatch.routed.route import Route
from moesaic.dispatch.routed.sum_order import by_node
from moesaic.errors import DeadlineExceeded, FrameError, MoesaicError, PeerLost
from moesaic.native.library import lib
from moesaic.native.structs import AskArgs, AskedArgs
from moesaic.transport.contract import Link
from moesaic.transport.failure import error_of
from moesaic.transport.frame import Frame, FrameKind, FrameLimits
from moesaic.transport.rings.channel import Channel

DONE = 0  # of ask_finish
ANSWERS = (FrameKind.REPLY, FrameKind.ERROR)
POLL_S = 0.0005  # for answers that come to Python


@dataclass(frozen=True, eq=False)
class LayerAsk:
    """One layer of one route, as the C functions take it."""

    c: AskArgs
    links: Sequence[Link]
    channels: Sequence[Channel]
    num_nodes: int
    kept: Any = field(repr=False)  # memory that ``c`` points to


def plan_asks(route: Route, limits: FrameLimits, hidden_size: int) -> dict[int, LayerAsk] | None:
    """Prepare the layers of a route.

    Returns:
        ``None`` if some link has no channel: then Python asks.
    """
    channels: dict[int, Channel] = {}
    for idx, link in route.links.items():
        channel = getattr(link, "channel", None)
        if channel is None:
            return None
        channels[idx] = channel
    if any(len(indices) > lib().most_asked() for indices in route.targets.values()):
        return None
    asks = {}
    for layer, indices in route.targets.items():
        nodes = list(by_node(route.placement.workers, indices).values())
        order = [indices.index(idx) for node in nodes for idx in node]
        node_of = [number for number, node in enumerate(nodes) for _ in node]
        c_channels = (ctypes.c_void_p * len(indices))(*(channels[idx].c for idx in indices))
        numbers = torch.tensor([order, node_of], dtype=torch.int64)
        c = AskArgs(
            channels=ctypes.cast(c_channels, ctypes.POINTER(ctypes.c_void_p)),
            num=len(indices),
            order=numbers[0].data_ptr(),
            node_of=numbers[1].data_ptr(),
            num_workers=len(route.placement.workers),
            epoch=route.placement.epoch,
            layer=layer,
            hidden=hidden_size,
            max_rows=limits.max_rows,
            max_cols=limits.max_cols,
            max_bytes=limits.max_bytes,
        )
        asks[layer] = LayerAsk(
            c,
            [route.links[idx] for idx in indices],
            [channels[idx] for idx in indices],
            len(nodes),
            (c_channels, numbers),
        )
    return asks


class Asked:
    """One batch under way. Give it up, or finish it, before the next turn to use its links."""

    def __init__(
        self,
        ask: LayerAsk,
        step_id: bytes,
        seq: int,
        rows: Tensor,
        basis: Tensor,
        patience_s: float,
    ) -> None:
        """Send the rows.

        Args:
            ask: the layer.
            step_id: of the step.
            seq: of the first call, from ``NATIVE_SEQ`` on; the others follow.
            rows: float32 ``[T, H]``, contiguous.
            basis: int64, encoded.
            patience_s: longest wait for all replies.
        """
        self._ask, self._step_id, self._seq = ask, step_id, seq
        self._patience_s, self._deadline_s = patience_s, time.monotonic() + patience_s
        self.out = torch.empty_like(rows)
        node_sum = torch.empty_like(rows) if ask.num_nodes > 1 else None
        self.loads = torch.empty(ask.c.num_workers, dtype=torch.int64) if len(basis) > 1 else None
        self._kept = rows, basis, node_sum
        self._c = AskedArgs(
            id_low=int.from_bytes(step_id[:8], "little"),
            id_high=int.from_bytes(step_id[8:], "little"),
            seq=seq,
            rows=rows.data_ptr(),
            basis=basis.data_ptr(),
            count=len(rows),
            basis_rows=len(basis),
            basis_size=basis.shape[1],
            out=self.out.data_ptr(),
            node_sum=None if node_sum is None else node_sum.data_ptr(),
            loads=None if self.loads is None else self.loads.data_ptr(),
            deadline_ns=int(self._deadline_s * 1e9),
        )
        if lib().ask_begin(ask=ask.c, asked=self._c):
            lib().ask_end(ask=ask.c)
            raise MemoryError("no memory for a request")

    def finish(self, bell: int) -> bool:
        """Wait for the replies; True if ``out`` is their sum.

        Else ``outcomes`` has to be awaited.
        """
        return bool(lib().ask_finish(ask=self._ask.c, asked=self._c, bell=bell) == DONE)

    async def outcomes(self) -> list[Frame | MoesaicError]:
        """Settle what ``finish`` left: each worker's answer, or the error that stands for it.

        A link whose answer is missing at the deadline is discarded.
        """
        found: list[Frame | MoesaicError | None] = [None] * len(self._ask.links)
        try:
            while True:
                for at, (link, channel) in enumerate(
                    zip(self._ask.links, self._ask.channels, strict=True)
                ):
                    if found[at] is None:
                        found[at] = self._outcome(at, link, channel)
                if all(each is not None for each in found):
                    break
                if time.monotonic() >= self._deadline_s:
                    self._give_up(found)
                    break
                await asyncio.sleep(POLL_S)
        finally:
            lib().ask_end(ask=self._ask.c)
        return [each for each in found if each is not None]

    def _outcome(self, at: int, link: Link, channel: Channel) -> Frame | MoesaicError | None:
        found: Frame | MoesaicError | None = None
        for message in channel.kept():
            try:
                frame = Frame.decode(message, self._limits)
                if frame.kind in ANSWERS and frame.seq == self._seq + at:
                    found = self._checked(frame)
                else:
                    channel.put_back(message)
            except FrameError as error:
                link.discard(str(error))
                return error
        if found is None and not link.alive:
            return PeerLost(link.peer, "the link is closed")
        return found

    def _checked(self, reply: Frame) -> Frame | MoesaicError:
        c = self._ask.c
        for name, is_right in (
            ("request_id", reply.request_id == self._step_id),
            ("epoch", reply.epoch == c.epoch),
            ("layer", reply.layer == c.layer),
        ):
            if not is_right:
                raise FrameError(name, "answers another request")
        return error_of(reply) if reply.kind is FrameKind.ERROR else reply

    @property
    def _limits(self) -> FrameLimits:
        c = self._ask.c
        return FrameLimits(c.max_rows, c.max_cols, c.max_bytes)

    def _give_up(self, found: list[Frame | MoesaicError | None]) -> None:
        cause = f"no answer within {self._patience_s * 1e3:.0f} ms"
        for at, link in enumerate(self._ask.links):
            if found[at] is None:
                what = f"layer {self._ask.c.layer} on {link.peer}"
                found[at] = DeadlineExceeded(what, self._patience_s * 1e3)
                link.discard(cause)
