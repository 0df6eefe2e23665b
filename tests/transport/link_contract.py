"""The promises of ``moesaic.transport.contract.Link``: its end ends all that waits for it, and nothing of it stays.

A test file of an implementation has a subclass, with the kinds of its ``cluster``.
"""

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch

from moesaic.errors import (
    DeadlineExceeded,
    FrameError,
    PeerLost,
)
from moesaic.transport.contract import Handler
from moesaic.transport.frame import Frame, FrameLimits
from tests.transport.linked import HANG_S, linked, never

Ask = Callable[..., Frame]
Until = Callable[[Callable[[], bool]], Awaitable[None]]


class LinkContract:
    """Every link, at both of its ends."""

    @pytest.mark.parametrize("loser", ["near", "far"])
    async def test_an_ended_link_is_freed_without_a_look_for_garbage(
        self, cluster: Any, echo: Handler, ask: Ask, until: Until, loser: str
    ) -> None:
        """A channel's memory, of many megabytes, is freed with it; under steady load garbage is seldom looked for."""
        near, link = await linked(cluster, echo)
        await near.exchange([(link, ask())], HANG_S)
        ended = weakref.ref(link)
        gc.collect()
        gc.disable()
        try:
            if loser == "near":
                link.discard("no longer wanted")
            else:
                await cluster.networks[1].close()

            del link

            await until(lambda: ended() is None)
        finally:
            gc.enable()

    @pytest.mark.parametrize("name", ["request_id", "epoch", "layer", "seq"])
    async def test_an_answer_to_another_request_ends_the_link(
        self, cluster: Any, ask: Ask, name: str
    ) -> None:
        async def answer(request: Frame) -> Frame:
            foreign = request.reply(request.tensors)
            setattr(foreign, name, bytes(range(16)) if name == "request_id" else 99)
            return foreign

        near, link = await linked(cluster, answer)

        (outcome,) = await near.exchange([(link, ask())], HANG_S)

        assert isinstance(outcome, FrameError)
        assert outcome.field == name
        assert not link.alive

    async def test_a_late_answer_reaches_nobody(self, cluster: Any, ask: Ask) -> None:
        is_late = asyncio.Event()

        async def answer(request: Frame) -> Frame:
            if request.flags:
                await is_late.wait()
            return request.reply(request.tensors)

        near, far = cluster.network("near"), cluster.network("far")
        address = await far.listen("127.0.0.1", 0, answer)
        link = await near.connect(address, "far", HANG_S)
        slow, next_one = ask(seq=1, rows=2, flags=1), ask(seq=1, rows=3)
        next_one.request_id = slow.request_id  # as much like the late one as a request can be

        (late,) = await near.exchange([(link, slow)], 0.02)
        is_late.set()
        (on_the_same_link,) = await near.exchange([(link, next_one)], HANG_S)
        fresh = await near.connect(address, "far", HANG_S)
        (on_a_fresh_link,) = await near.exchange([(fresh, next_one)], HANG_S)

        assert isinstance(late, DeadlineExceeded)
        assert isinstance(on_the_same_link, PeerLost)
        assert not link.alive
        assert on_a_fresh_link.tensors[0].shape == (3, 256)

    async def test_a_cancelled_exchange_discards_its_links(
        self, cluster: Any, ask: Ask, until: Until
    ) -> None:
        started, stopped = asyncio.Event(), asyncio.Event()

        async def answer(request: Frame) -> Frame:
            started.set()
            try:
                return await never(request)
            finally:
                stopped.set()

        near, link = await linked(cluster, answer)
        exchange = asyncio.create_task(near.exchange([(link, ask())], HANG_S))
        await started.wait()

        exchange.cancel()

        with pytest.raises(asyncio.CancelledError):
            await exchange
        assert not link.alive
        await stopped.wait()  # the far side does not compute for nobody

    async def test_discarding_a_link_fails_what_is_outstanding(
        self, cluster: Any, ask: Ask, until: Until
    ) -> None:
        started = asyncio.Event()

        async def answer(request: Frame) -> Frame:
            started.set()
            return await never(request)

        near, link = await linked(cluster, answer)
        exchange = asyncio.create_task(near.exchange([(link, ask())], HANG_S))
        await started.wait()

        link.discard("not wanted")

        (outcome,) = await exchange
        assert isinstance(outcome, PeerLost)
        assert "not wanted" in str(outcome)

    async def test_a_closed_peer_is_noticed(
        self, cluster: Any, echo: Handler, ask: Ask, until: Until
    ) -> None:
        near, far = cluster.network("near"), cluster.network("far")
        link = await near.connect(await far.listen("127.0.0.1", 0, echo), "far", HANG_S)

        await far.close()
        await until(lambda: not link.alive)

        (outcome,) = await near.exchange([(link, ask())], HANG_S)
        assert isinstance(outcome, PeerLost)

    async def test_an_answer_beyond_the_limits_ends_the_link(self, cluster: Any, ask: Ask) -> None:
        async def answer(request: Frame) -> Frame:
            return request.reply([torch.zeros(64, 256)])

        near = cluster.network("near", limits=FrameLimits(8, 256, 16_384))
        far = cluster.network("far")
        link = await near.connect(await far.listen("127.0.0.1", 0, answer), "far", HANG_S)

        (outcome,) = await near.exchange([(link, ask())], HANG_S)

        assert isinstance(outcome, PeerLost | FrameError)
        assert not link.alive

    async def test_closing_with_exchanges_in_flight_ends_them_all(
        self, cluster: Any, ask: Ask, until: Until
    ) -> None:
        serving = asyncio.Event()

        async def answer(request: Frame) -> Frame:
            serving.set()
            return await never(request)

        near, link = await linked(cluster, answer)
        exchanges = [
            asyncio.create_task(near.exchange([(link, ask(seq=seq, rows=1024))], HANG_S))
            for seq in range(8)
        ]
        await serving.wait()

        await near.close()
        await near.close()

        for exchange in exchanges:
            (outcome,) = await exchange
            assert isinstance(outcome, PeerLost)

    async def test_a_closed_link_takes_no_notes_and_no_probes(
        self, cluster: Any, echo: Handler, ask: Ask
    ) -> None:
        _, link = await linked(cluster, echo)
        link.discard("enough")

        with pytest.raises(PeerLost):
            link.post(ask(seq=1, rows=1))
        with pytest.raises(PeerLost):
            await link.probe(100, HANG_S)

    async def test_a_probe_fails_with_its_link(self, cluster: Any, echo: Handler) -> None:
        _, link = await linked(cluster, echo)
        probing = asyncio.ensure_future(link.probe(0, HANG_S))
        await asyncio.sleep(0)
        link.discard("enough")

        with pytest.raises(PeerLost):
            await probing
