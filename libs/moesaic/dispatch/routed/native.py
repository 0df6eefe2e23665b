"""Exchanges of plain batches in C: the same sums as ``RoutedDispatcher`` makes of replies.

One C function sends the rows to all workers of a layer, another waits and adds up. Replies of other
kinds come back to Python as messages, and the dispatcher settles the exchange as its own.
"""

import asyncio
import ctypes
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moesaic.dispatch.expert_waits import Work
from moesaic.dispatch.route import Route
from moesaic.dispatch.routed.asking import AskedBatch, Outcome, RoutedStep, Sum
from moesaic.dispatch.sum_order import by_node
from moesaic.errors import DeadlineExceeded, FrameError, PeerLost
from moesaic.kernels.promised import PromisedRows
from moesaic.messages.wire import WireDtype
from moesaic.native.library import lib
from moesaic.native.structs import ApartArgs, AskArgs, AskedArgs
from moesaic.transport.contract import Link, Network
from moesaic.transport.failure import error_of
from moesaic.transport.frame import Frame, FrameKind, FrameLimits
from moesaic.transport.rings.channel import NATIVE_SEQ, Channel
from moesaic.transport.tensor_table import CODE_OF_DTYPE

DONE = 0  # of ask_finish
ANSWERS = (FrameKind.REPLY, FrameKind.ERROR)
ROW_DTYPES = (torch.float32, torch.bfloat16)  # of rows that C functions send
POLL_S = 0.0005  # for answers that come to Python
ROWS_PER_TIMEOUT = 512  # a larger batch may take longer, in proportion


@dataclass(frozen=True, eq=False)
class LayerAsk:
    """One layer of one route, as the C functions take it."""

    c: AskArgs
    links: Sequence[Link]
    channels: Sequence[Channel]
    num_nodes: int
    took_ns: Tensor  # int64 [num]: what each worker said that it took since the last look
    kept: Any = field(repr=False)  # memory that ``c`` points to


@dataclass(frozen=True, eq=False)
class RouteAsks:
    """All layers of a route."""

    by_layer: dict[int, LayerAsk]
    in_a_row: Any  # array of AskArgs in the order of layers


def plan_asks(
    route: Route, limits: FrameLimits, hidden_size: int, travels_as: torch.dtype
) -> RouteAsks | None:
    """Prepare the layers of a route; rows travel as float32, bfloat16, or int8 with scales.

    Returns:
        ``None`` if some link has no channel: then Python asks.
    """
    channels: dict[int, Channel] = {}
    for idx, link in route.links.items():
        if link.channel is None:
            return None
        channels[idx] = link.channel
    if any(len(indices) > lib().most_asked() for indices in route.targets.values()):
        return None
    asks = {
        layer: _plan_layer(route, layer, limits, hidden_size, travels_as, channels)
        for layer in sorted(route.targets)
    }
    return RouteAsks(asks, (AskArgs * len(asks))(*(ask.c for ask in asks.values())))


def _plan_layer(
    route: Route,
    layer: int,
    limits: FrameLimits,
    hidden_size: int,
    travels_as: torch.dtype,
    channels: dict[int, Channel],
) -> LayerAsk:
    indices, basis = route.targets[layer], route.encoded[layer]
    nodes = list(by_node(route.placement.workers, indices).values())
    order = [indices.index(idx) for node in nodes for idx in node]
    node_of = [number for number, node in enumerate(nodes) for _ in node]
    c_channels = (ctypes.c_void_p * len(indices))(*(channels[idx].c for idx in indices))
    numbers = torch.tensor([order, node_of], dtype=torch.int64)
    took_ns = torch.zeros(len(indices), dtype=torch.int64)
    usual = route.usual_loads.get(layer)
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
        code=CODE_OF_DTYPE[travels_as],
        basis=basis.data_ptr(),
        basis_size=basis.shape[1],
        usual=usual.mean.data_ptr() if usual else None,
        known=usual.known.data_ptr() if usual else None,
        took_ns=took_ns.data_ptr(),
    )
    return LayerAsk(
        c,
        [route.links[idx] for idx in indices],
        [channels[idx] for idx in indices],
        len(nodes),
        took_ns,
        (c_channels, numbers, basis, usual),
    )


class NativeAsking:
    """Asks plain batches, as far as the network can do without Python."""

    def __init__(self, network: Network, timeout_s: float, wire: WireDtype) -> None:
        """Wait ``timeout_s`` for the replies to a batch of up to ``ROWS_PER_TIMEOUT`` rows.

        Rows and sums travel as ``wire`` says.
        """
        self._wire = wire
        # Only some event loops sleep in C: it is known once the network is there.
        self._network = network if network.bell >= 0 else None
        self._timeout_s, self._seq = timeout_s, NATIVE_SEQ
        # Of the last route
        self._asks: dict[tuple[Route, torch.dtype], RouteAsks | None] = {}

    def patience_s(self, num_rows: int) -> float:
        """The longest wait for the replies to a batch."""
        return self._timeout_s * max(1.0, num_rows / ROWS_PER_TIMEOUT)

    def asks_of(
        self, route: Route, hidden_size: int, dtype: torch.dtype = torch.float32
    ) -> RouteAsks | None:
        """Prepare a route for rows of ``dtype``; ``None`` if Python has to ask."""
        if self._network is None or not route.usable or dtype not in ROW_DTYPES:
            return None
        travels_as = torch.int8 if self._wire == "int8" else dtype
        key = route, travels_as
        if key not in self._asks:
            limits = FrameLimits.of_hidden_size(hidden_size)
            self._asks = {key: plan_asks(route, limits, hidden_size, travels_as)}
        return self._asks[key]

    def begin(self, step: RoutedStep, batch: AskedBatch) -> "SentBatch | None":
        """Send a batch now; None: it is not plain, or some worker has no channel."""
        rows, promised = batch.rows, batch.promised
        if batch.routing is not None or batch.parcels:
            return None
        if promised is not None and promised.degraded.is_cuda:
            return None
        asks = self.asks_of(step.route, rows.shape[1], rows.dtype)
        if asks is None or self._network is None:
            return None
        if self._wire == "int8":
            # Packed where they are sent.
            rows = rows.float()
        ask, seq = asks.by_layer[batch.layer], self._seq
        self._seq += ask.c.num
        unsettled = _Unsettled(ask, step.step_id, seq, self.patience_s(len(rows)))
        return SentBatch(unsettled, rows.contiguous(), self._network, promised)

    def take_work(self, work: Work) -> None:
        """Add what workers said that they computed since the last call, on the last route."""
        for (route, _), asks in self._asks.items():
            for layer, ask in asks.by_layer.items() if asks is not None else ():
                for idx, took_ns in zip(route.targets[layer], ask.took_ns.tolist(), strict=True):
                    work.add(route.placement.workers[idx].worker_id, took_ns)
                ask.took_ns.zero_()

    def apart(self, asks: RouteAsks, step_id: bytes) -> ApartArgs:
        """Describe the exchanges of one step, whose id has 16 bytes; ``note`` takes them back."""
        low, high = _halves(step_id)
        # Or it had planned nothing.
        assert self._network is not None
        others, num_others = self._network.channels
        return ApartArgs(
            others=others,
            num_others=num_others,
            asks=asks.in_a_row,
            id_low=low,
            id_high=high,
            seq=self._seq,
            patience_ns=int(self._timeout_s * 1e9),
            patience_rows=ROWS_PER_TIMEOUT,
            bell=self._network.bell,
        )

    def note(self, apart: ApartArgs) -> None:
        """Continue after the exchanges of a step."""
        self._seq = int(apart.seq)

    def unsettled(
        self, asks: RouteAsks, step_id: bytes, layer: int, seq: int, deadline_ns: int
    ) -> "_Unsettled":
        """Take an exchange that failed in a step."""
        return _Unsettled(asks.by_layer[layer], step_id, seq, self._timeout_s, deadline_ns * 1e-9)


class _Unsettled:
    """An exchange, as Python sees it while C functions do not settle it."""

    def __init__(
        self,
        ask: LayerAsk,
        step_id: bytes,
        seq: int,
        patience_s: float,
        deadline_s: float | None = None,
    ) -> None:
        """``seq`` is the first call's, from ``NATIVE_SEQ`` on; the others follow."""
        self.ask, self.step_id, self.seq = ask, step_id, seq
        self.deadline_s = time.monotonic() + patience_s if deadline_s is None else deadline_s
        self._patience_s = patience_s

    async def outcomes(self) -> Sequence[Outcome]:
        """Wait for each worker's answer, or the error that stands for it.

        A link whose answer is missing at the deadline is discarded.
        """
        found: list[Outcome | None] = [None] * len(self.ask.links)
        try:
            while True:
                for at, (link, channel) in enumerate(
                    zip(self.ask.links, self.ask.channels, strict=True)
                ):
                    if found[at] is None:
                        found[at] = self._outcome(at, link, channel)
                if all(each is not None for each in found):
                    break
                if time.monotonic() >= self.deadline_s:
                    self._give_up(found)
                    break
                await asyncio.sleep(POLL_S)
        finally:
            lib().ask_end(ask=self.ask.c)
        return [each for each in found if each is not None]

    def _outcome(self, at: int, link: Link, channel: Channel) -> Outcome | None:
        found: Outcome | None = None
        for message in channel.kept():
            try:
                frame = Frame.decode(message, self._limits)
                if frame.kind in ANSWERS and frame.seq == self.seq + at:
                    found = self._checked(frame)
                else:
                    channel.put_back(message)
            except FrameError as error:
                link.discard(str(error))
                return error
        if found is None and not link.alive:
            return PeerLost(link.peer, "the link is closed")
        return found

    def _checked(self, reply: Frame) -> Outcome:
        c = self.ask.c
        for name, is_right in (
            ("request_id", reply.request_id == self.step_id),
            ("epoch", reply.epoch == c.epoch),
            ("layer", reply.layer == c.layer),
        ):
            if not is_right:
                raise FrameError(name, "answers another request")
        return error_of(reply) if reply.kind is FrameKind.ERROR else reply

    @property
    def _limits(self) -> FrameLimits:
        c = self.ask.c
        return FrameLimits(c.max_rows, c.max_cols, c.max_bytes)

    def _give_up(self, found: list[Outcome | None]) -> None:
        cause = f"no answer within {self._patience_s * 1e3:.0f} ms"
        for at, link in enumerate(self.ask.links):
            if found[at] is None:
                what = f"layer {self.ask.c.layer} on {link.peer}"
                found[at] = DeadlineExceeded(what, self._patience_s * 1e3)
                link.discard(cause)


class SentBatch:
    """One batch in flight. Finish it before the next turn to use its links, or drop it."""

    def __init__(
        self,
        unsettled: _Unsettled,
        rows: Tensor,
        network: Network,
        promised: PromisedRows | None = None,
    ) -> None:
        """Send the rows ``[T, H]``, contiguous: bfloat16 if they travel so, else float32."""
        ask = unsettled.ask
        self._unsettled, self._network, self._under_way = unsettled, network, True
        self._kernels = lib()
        self.out = torch.empty_like(rows, dtype=torch.float32)
        node_sum = torch.empty_like(self.out) if ask.num_nodes > 1 else None
        self._kept = rows, node_sum, promised
        low, high = _halves(unsettled.step_id)
        self._c = AskedArgs(
            id_low=low,
            id_high=high,
            seq=unsettled.seq,
            rows=rows.data_ptr(),
            basis=ask.c.basis,
            count=len(rows),
            basis_rows=1,
            basis_size=ask.c.basis_size,
            out=self.out.data_ptr(),
            node_sum=None if node_sum is None else node_sum.data_ptr(),
            deadline_ns=int(unsettled.deadline_s * 1e9),
            promises=None if promised is None else ctypes.pointer(promised.c),
            degraded=None if promised is None else promised.counts.data_ptr(),
        )
        if lib().ask_begin(ask=ask.c, asked=self._c):
            raise MemoryError("no memory for a request")

    def __del__(self) -> None:
        if self._under_way:
            self._kernels.ask_end(ask=self._unsettled.ask.c)

    def finish(self) -> bool:
        """Wait for the replies; True if ``out`` is their sum.

        Else ``outcomes`` has to be awaited.
        """
        ask, bell = self._unsettled.ask, self._network.bell
        self._c.others, self._c.num_others = self._network.channels
        done = bool(lib().ask_finish(ask=ask.c, asked=self._c, bell=bell) == DONE)
        self._under_way = not done
        return done

    async def settle(self) -> Sum | Sequence[Outcome]:
        """See ``Begun.settle``."""
        if self.finish():
            return Sum(self.out, float(self._c.slowest_ns) * 1e-9)
        return await self.outcomes()

    async def outcomes(self) -> Sequence[Outcome]:
        """Settle an exchange that ``finish`` has left: each worker's answer, or its error."""
        self._under_way = False
        return await self._unsettled.outcomes()


def _halves(step_id: bytes) -> tuple[int, int]:
    return int.from_bytes(step_id[:8], "little"), int.from_bytes(step_id[8:], "little")
