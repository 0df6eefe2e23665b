"""``all-to-all``: synchronous expert parallelism, the baseline that ``gathered`` is measured against.

Each worker has its share of every layer's experts and its own requests. At every layer all workers
send each other the rows that are routed there, each computes the rows that came, and sums go back.
All wait for all, so a step is a round of every worker, and one without requests joins with no rows.
A lost worker stops all; that is in the nature of the baseline.

A request carries hidden states ``[n, H]``, weights float32 ``[n, k]`` and ids int32 ``[n, k]``. Its ``epoch`` is the
round, its ``digest`` the index of the sender's share. The reply has sums float32 ``[n, H]``.
"""

import asyncio
import itertools
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moesaic.dispatch.contract import Step
from moesaic.dispatch.gathered.peers import PEER_EVENTS, Peer
from moesaic.dispatch.links import DialledLinks
from moesaic.errors import (
    DeadlineExceeded,
    ExpertUnavailable,
    InvalidInput,
    MoesaicError,
    NotReady,
    StaleEpoch,
)
from moesaic.experts.pull.ranges import Share
from moesaic.experts.slots import load_table
from moesaic.kernels.held_bytes import Quantization
from moesaic.kernels.linear import activation_dtype
from moesaic.kernels.promised import PromisedRows
from moesaic.models.configuration.config import ModelConfig
from moesaic.models.layers.gate import load_gates
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.transport.contract import Link, Network
from moesaic.transport.frame import Frame, FrameKind

Outcomes = list[Frame | MoesaicError]

PATIENCE_S = 0.002  # for the engine here to begin a step, before others step without its rows


@dataclass
class _Meeting:
    """One layer of one round: the others' rows, and the sums that they wait for."""

    frames: dict[int, Frame] = field(default_factory=dict)  # by share
    sums: dict[int, "asyncio.Future[Tensor]"] = field(default_factory=dict)
    complete: asyncio.Event = field(default_factory=asyncio.Event)


class AllToAllDispatcher:
    """One of ``share.count`` workers that compute every layer as one. Lives on the engine's loop."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: ModelConfig,
        share: Share,
        dtype: torch.dtype,
        quantization: Quantization = "none",
    ) -> None:
        """Read the gates and this worker's share of the experts.

        Raises:
            CheckpointError: a tensor is missing, mis-shaped or cannot be read.
        """
        cpu, num_experts = torch.device("cpu"), config.moe.num_experts
        self._share, self._layers, self._hidden_size = share, config.moe_layers, config.hidden_size
        self._gates = load_gates(checkpoint, config, dtype, cpu)
        mine = list(share.experts(num_experts))
        wanted = dict.fromkeys(config.moe_layers, mine)
        self._table = load_table(checkpoint, config, wanted, dtype, cpu, quantization).table
        served = [expert in mine for expert in range(num_experts)]
        self._slots = self._table.slot_of_expert(config.moe_layers[0], num_experts, served)
        self._dtype = activation_dtype(dtype, cpu)
        self._nothing = (
            torch.empty(0, config.hidden_size, dtype=self._dtype),
            torch.empty(0, config.moe.top_k),
            torch.empty(0, config.moe.top_k, dtype=torch.int32),
        )
        self._links: dict[int, Link] = {}  # by share
        self._linked = asyncio.Event()
        self._seq = itertools.count(1)
        self._round = 0  # begun last
        self._meetings: defaultdict[tuple[int, int], _Meeting] = defaultdict(_Meeting)
        self._wanted = False  # the engine has rows for the next round
        self._without_rows: asyncio.Task[None] | None = None

    def connect(self, network: Network, timeout_s: float) -> None:
        """Use ``network``, of this event loop; no layer waits longer than ``timeout_s`` for others."""
        self._network, self._timeout_s = network, timeout_s
        self._dialled: DialledLinks[Peer] = DialledLinks(
            network, PEER_EVENTS, self._take, redial=True
        )

    def set_peers(self, peers: Sequence[Peer]) -> None:
        """Learn the workers of the other shares."""
        others = [peer for peer in peers if peer.share.count == self._share.count]
        self._dialled.keep(others)
        for peer in others:
            self._dialled.dial(peer)

    @property
    def waiting_for(self) -> list[str]:
        """See ``Dispatcher.waiting_for``."""
        missing = [str(share) for share in self._missing()]
        return [f"attention workers with the shares {', '.join(missing)}"] if missing else []

    def begin_step(self) -> Step:
        """See ``Dispatcher.begin_step``."""
        if self.waiting_for:
            raise NotReady(f"waiting for {self.waiting_for[0]}", code="expert_unavailable")
        self._wanted = True  # others wait for these rows from now on
        return Step(os.urandom(16), epoch=0)

    def end_step(self, step: Step) -> None:
        """End the round; the next one may begin without this worker's rows."""
        self._wanted = False
        self._meetings = defaultdict(
            _Meeting, {key: m for key, m in self._meetings.items() if key[0] > self._round}
        )
        self._join_soon()

    async def dispatch(
        self,
        step: Step,
        layer: int,
        hidden_states: Tensor,
        promised: PromisedRows | None = None,
    ) -> Tensor:
        """See ``Dispatcher.dispatch``; the order of sums follows the shares. Steps have no substitution."""
        if layer == self._layers[0]:
            if self._without_rows is not None:
                await asyncio.wait([self._without_rows])
            self._round += 1
        topk_weights, topk_ids = self._gates[layer](hidden_states)
        rows = (hidden_states, topk_weights, topk_ids)
        return (await self._meet(self._round, layer, rows)).to(hidden_states.dtype)

    async def reachable(self) -> None:
        """See ``Dispatcher.reachable``."""
        while self._missing():
            self._linked.clear()
            await self._linked.wait()

    async def answer(self, request: Frame) -> Frame:
        """Take another worker's rows for a layer, and give their sums back once all have met."""
        share, round_ = request.digest, request.epoch
        if share >= self._share.count or len(request.tensors) != 3:
            raise InvalidInput("frame.digest", f"no share {share} with {len(request.tensors)}")
        if request.tensors[0].shape[1] != self._hidden_size:
            raise InvalidInput("frame.tensors", f"hidden size is {self._hidden_size}")
        if round_ < self._round:
            raise StaleEpoch(round_, self._round)
        meeting = self._meetings[round_, request.layer]
        meeting.frames[share] = request
        sums = meeting.sums[share] = asyncio.get_running_loop().create_future()
        if len(meeting.frames) == self._share.count - 1:
            meeting.complete.set()
        self._join_soon()
        return request.reply([await sums])

    async def close(self) -> None:
        """Drop all links."""
        if self._without_rows is not None:
            self._without_rows.cancel()
        await self._dialled.close()

    def _missing(self) -> list[Share]:
        count = self._share.count
        return [
            Share(index, count)
            for index in range(count)
            if index != self._share.index
            and not (index in self._links and self._links[index].alive)
        ]

    def _take(self, peer: Peer, link: Link | None) -> None:
        if link is None:
            return
        self._links[peer.share.index] = link
        self._linked.set()
        self._join_soon()

    def _join_soon(self) -> None:
        """Join others' rounds soon, unless the engine begins a step of its own first."""
        asyncio.get_running_loop().call_later(PATIENCE_S, self._join_others)

    def _join_others(self) -> None:
        """Join a round without rows, if others have begun one and the engine here has none."""
        others = [key[0] for key in self._meetings if key[0] > self._round]
        free = not self._wanted and self._without_rows is None
        # Else when the last one is linked.
        if others and free and not self._missing():
            self._round = min(others)
            self._without_rows = asyncio.ensure_future(self._step_without_rows(self._round))

    async def _step_without_rows(self, round_: int) -> None:
        try:
            for layer in self._layers:
                await self._meet(round_, layer, self._nothing)
        except MoesaicError:
            # Workers that have rows in this round are told.
            pass
        finally:
            self._without_rows = None
            if not self._wanted:
                self._join_soon()

    async def _meet(self, round_: int, layer: int, rows: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Send rows to all, compute those that came, and send sums back."""
        ids = rows[2]
        count, me = self._share.count, self._share.index
        others = [share for share in range(count) if share != me]
        routed = [(ids % count == share).any(dim=1).nonzero().flatten() for share in others]
        if self._missing():
            raise ExpertUnavailable(layer, cause="a worker is lost")
        calls = [
            (self._links[share], self._request(round_, layer, [t[to] for t in rows]))
            for share, to in zip(others, routed, strict=True)
        ]
        sending = asyncio.ensure_future(self._network.exchange(calls, self._timeout_s))
        meeting = self._meetings[round_, layer]
        try:
            if others:
                await self._rows_met(meeting, sending)
        except TimeoutError:
            sending.cancel()
            [outcomes] = await asyncio.gather(sending, return_exceptions=True)
            self._catch_up(outcomes if isinstance(outcomes, list) else [])
            budget_ms = self._timeout_s * 1e3
            missing = DeadlineExceeded("the other workers' rows", budget_ms)
            raise ExpertUnavailable(layer, cause=str(missing)) from missing
        if others and not meeting.complete.is_set():
            self._catch_up(sending.result())
            raise ExpertUnavailable(layer, cause="another worker does not step along")
        combined = self._compute(layer, rows, meeting)
        outcomes = await sending
        self._catch_up(outcomes)
        self._meetings.pop((round_, layer), None)
        for to, outcome in zip(routed, outcomes, strict=True):
            if isinstance(outcome, MoesaicError):
                raise ExpertUnavailable(layer, cause=str(outcome)) from outcome
            combined.index_add_(0, to, outcome.tensors[0])
        return combined

    async def _rows_met(self, meeting: _Meeting, sending: "asyncio.Future[Outcomes]") -> None:
        """Wait until all rows have met here, or the others have answered and one of them failed.

        Raises:
            TimeoutError: it took too long.
        """
        met = asyncio.ensure_future(meeting.complete.wait())
        both: set[asyncio.Future[Any]] = {met, sending}
        try:
            async with asyncio.timeout(self._timeout_s):
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                answered = sending.result() if sending.done() else []
                if not any(isinstance(outcome, MoesaicError) for outcome in answered):
                    await met
        finally:
            met.cancel()

    def _catch_up(self, outcomes: Sequence[Frame | MoesaicError]) -> None:
        """Learn the round from workers that went on while this one was away."""
        for outcome in outcomes:
            if isinstance(outcome, StaleEpoch):
                self._round = max(self._round, outcome.current)

    def _compute(
        self, layer: int, rows: tuple[Tensor, Tensor, Tensor], meeting: _Meeting
    ) -> Tensor:
        """Compute all rows that have met here, and hand out the others' sums.

        Returns:
            The own sums, float32 ``[n, H]``.
        """
        shares = sorted(meeting.frames)
        batches = [rows, *(tuple(meeting.frames[share].tensors) for share in shares)]
        hidden, weights, ids = (torch.cat(parts) for parts in zip(*batches, strict=True))
        if len(hidden):
            combined = self._table.compute(layer, hidden, weights, ids, self._slots)
        else:
            combined = torch.zeros(0, self._hidden_size)
        start = len(rows[0])
        for share, batch in zip(shares, batches[1:], strict=True):
            end = start + len(batch[0])
            # The sender may be gone.
            if not meeting.sums[share].done():
                meeting.sums[share].set_result(combined[start:end])
            start = end
        return combined[: len(rows[0])].clone()

    def _request(self, round_: int, layer: int, tensors: list[Tensor]) -> Frame:
        return Frame(
            kind=FrameKind.REQUEST,
            epoch=round_,
            layer=layer,
            seq=next(self._seq),
            digest=self._share.index,
            tensors=tensors,
        )
