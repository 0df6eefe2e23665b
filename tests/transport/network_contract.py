"""The promises of ``moesaic.transport.contract.Network``, which every network keeps.

A test file of an implementation has a subclass, with the kinds of its ``cluster``.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch

from moesaic.errors import (
    DeadlineExceeded,
    ExpertUnavailable,
    InvalidInput,
    MoesaicError,
    Overloaded,
    PeerLost,
    StaleEpoch,
)
from moesaic.transport.contract import Handler, Link, Network
from moesaic.transport.frame import Frame, FrameKind
from tests.transport.linked import HANG_S, Deadlines, linked, never

Ask = Callable[..., Frame]
Until = Callable[[Callable[[], bool]], Awaitable[None]]


class NetworkContract:
    """Every network."""

    async def test_a_reply_repeats_the_request(self, cluster: Any, echo: Handler, ask: Ask) -> None:
        near, link = await linked(cluster, echo)
        request = ask(seq=7, rows=5, epoch=3, layer=2)

        (answer,) = await near.exchange([(link, request)], HANG_S)

        assert isinstance(near, Network)
        assert isinstance(link, Link)
        assert (link.peer, link.alive) == ("far", True)
        assert isinstance(answer, Frame)
        assert answer.answers(request) is None
        assert torch.equal(answer.tensors[0], request.tensors[0])

    async def test_no_calls_have_no_outcomes(self, cluster: Any) -> None:
        assert await cluster.network("near").exchange([], 1.0) == []

    async def test_one_exchange_spans_many_peers_in_the_order_of_its_calls(
        self, cluster: Any, echo: Handler, ask: Ask
    ) -> None:
        near = cluster.network("near")
        links = []
        for idx in range(3):
            far = cluster.network(f"far-{idx}")
            address = await far.listen("127.0.0.1", 0, echo)
            links.append(await near.connect(address, f"far-{idx}", HANG_S))

        answers = await near.exchange(
            [(link, ask(seq=idx)) for idx, link in enumerate(links)], HANG_S
        )

        assert [answer.tensors[0][0, 0].item() for answer in answers] == [0, 1, 2]

    async def test_exchanges_on_one_link_overlap(
        self, cluster: Any, ask: Ask, until: Until
    ) -> None:
        release = {seq: asyncio.Event() for seq in range(4)}

        async def answer(request: Frame) -> Frame:
            await release[request.seq].wait()
            return request.reply(request.tensors)

        near, link = await linked(cluster, answer)
        exchanges = [
            asyncio.create_task(near.exchange([(link, ask(seq=seq))], HANG_S)) for seq in range(4)
        ]

        for seq in (2, 0, 3, 1):
            release[seq].set()
            (outcome,) = await exchanges[seq]
            assert outcome.tensors[0][0, 0].item() == seq

    async def test_frames_outstanding_together_need_different_seq(
        self, cluster: Any, echo: Handler, ask: Ask
    ) -> None:
        near, link = await linked(cluster, echo)

        first, second = await near.exchange([(link, ask(seq=1)), (link, ask(seq=1))], HANG_S)

        assert isinstance(first, Frame)
        assert isinstance(second, InvalidInput)
        assert link.alive

    @pytest.mark.parametrize("error", [StaleEpoch(3, 4), ExpertUnavailable(2, cause="not loaded")])
    async def test_an_error_of_the_handler_is_the_outcome(
        self, cluster: Any, ask: Ask, error: MoesaicError
    ) -> None:
        async def answer(request: Frame) -> Frame:
            raise error

        near, link = await linked(cluster, answer)

        (outcome,) = await near.exchange([(link, ask())], HANG_S)

        assert type(outcome) is type(error)
        assert str(outcome) == str(error)
        assert link.alive

    async def test_a_fault_of_the_handler_is_told_without_its_text(
        self, cluster: Any, ask: Ask
    ) -> None:
        async def answer(request: Frame) -> Frame:
            raise RuntimeError("/secret/path")

        near, link = await linked(cluster, answer)

        (outcome,) = await near.exchange([(link, ask())], HANG_S)

        assert isinstance(outcome, MoesaicError)
        assert outcome.code == "internal_error"
        assert "secret" not in str(outcome)

    async def test_memory_that_ran_out_is_told_as_what_may_be_tried_again(
        self, cluster: Any, ask: Ask
    ) -> None:
        async def answer(request: Frame) -> Frame:
            raise RuntimeError(
                "DefaultCPUAllocator: can't allocate memory: you tried to allocate 7 bytes"
            )

        near, link = await linked(cluster, answer)

        (outcome,) = await near.exchange([(link, ask())], HANG_S)

        assert isinstance(outcome, Overloaded)
        assert "(7 bytes were refused)" in str(outcome)
        assert "--slots-per-layer" in str(outcome)
        assert link.alive

    async def test_one_late_peer_does_not_cost_the_others_their_answers(
        self, cluster: Any, echo: Handler, ask: Ask, deadlines: Deadlines
    ) -> None:
        near, quick, slow = (cluster.network(name) for name in ("near", "quick", "slow"))
        quick_link = await near.connect(await quick.listen("127.0.0.1", 0, echo), "quick", HANG_S)
        slow_link = await near.connect(await slow.listen("127.0.0.1", 0, never), "slow", HANG_S)

        calls = [(slow_link, ask(seq=1)), (quick_link, ask(seq=2))]
        exchange = asyncio.create_task(near.exchange(calls, deadlines.SECONDS))
        await asyncio.sleep(0)
        await near.exchange([(quick_link, ask(seq=3))], HANG_S)  # answered after the first
        deadlines.expire()
        slow_outcome, quick_outcome = await exchange

        assert isinstance(slow_outcome, DeadlineExceeded)
        assert isinstance(quick_outcome, Frame)
        assert (slow_link.alive, quick_link.alive) == (False, True)

    async def test_a_wrong_secret_is_refused_and_others_are_served(
        self, cluster: Any, echo: Handler, ask: Ask
    ) -> None:
        near, far = cluster.network("near"), cluster.network("far")
        intruder = cluster.network("intruder", secret=b"a guess")
        address = await far.listen("127.0.0.1", 0, echo)

        with pytest.raises(PeerLost, match="auth failed"):
            await intruder.connect(address, "far", HANG_S)

        link = await near.connect(address, "far", HANG_S)
        (outcome,) = await near.exchange([(link, ask())], HANG_S)
        assert isinstance(outcome, Frame)

    async def test_another_worker_at_the_address_is_refused(
        self, cluster: Any, echo: Handler
    ) -> None:
        near, far = cluster.network("near"), cluster.network("far")
        address = await far.listen("127.0.0.1", 0, echo)

        with pytest.raises(PeerLost, match="'far'"):
            await near.connect(address, "another", HANG_S)

    async def test_nobody_at_the_address_is_a_lost_peer(self, cluster: Any) -> None:
        with pytest.raises(PeerLost):
            await cluster.network("near").connect("127.0.0.1:1", "far", HANG_S)

    async def test_only_requests_are_served(self, cluster: Any, echo: Handler, ask: Ask) -> None:
        near, link = await linked(cluster, echo)
        request = ask()
        request.kind = FrameKind.REPLY

        (outcome,) = await near.exchange([(link, request)], HANG_S)

        assert isinstance(outcome, PeerLost)
        assert not link.alive

    async def test_a_note_is_handled_and_never_answered(
        self, cluster: Any, ask: Ask, until: Until
    ) -> None:
        handled: list[Frame] = []

        async def keep(request: Frame) -> Frame:
            handled.append(request)
            if request.layer == 1:
                raise StaleEpoch(1, 2)
            return request.reply(request.tensors)

        near, link = await linked(cluster, keep)
        for layer in (0, 1):
            note = ask(seq=5, rows=2, layer=layer)
            note.kind = FrameKind.NOTE
            link.post(note)

        (answer,) = await near.exchange(
            [(link, ask(seq=5, rows=3))], HANG_S
        )  # an answer would end the link

        await until(lambda: len(handled) == 3)
        assert isinstance(answer, Frame)
        assert link.alive
        assert sorted((f.kind, f.layer) for f in handled if f.kind is FrameKind.NOTE) == [
            (FrameKind.NOTE, 0),
            (FrameKind.NOTE, 1),
        ]

    async def test_probes_of_any_size_are_answered_side_by_side(
        self, cluster: Any, echo: Handler
    ) -> None:
        _, link = await linked(cluster, echo)

        took = await asyncio.gather(
            *(link.probe(nbytes, HANG_S) for nbytes in (0, 1, 1 << 16, 1 << 19))
        )

        assert all(seconds > 0 for seconds in took)
        assert link.alive

    async def test_some_peers_are_not_waited_for(self, cluster: Any, echo: Handler) -> None:
        far = cluster.network("far")
        address = await far.listen("127.0.0.1", 0, echo)
        links = [
            await cluster.network(name).connect(address, "far", HANG_S) for name in ("one", "other")
        ]
        leaving = asyncio.ensure_future(far.all_left(besides=["other"]))
        await asyncio.sleep(0)
        assert not leaving.done()

        links[0].discard("leaves")

        await leaving
        assert far.served_peers == ["other"]
        assert links[1].alive
