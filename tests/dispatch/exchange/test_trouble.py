"""What goes wrong beside the sums: links stay, waits end, nobody is asked twice at once, upkeep goes on."""

import asyncio
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moesaic.dispatch.exchange import attending, metrics
from moesaic.dispatch.exchange.choice import Choice
from moesaic.dispatch.exchange.contacts import Contact, Contacts
from moesaic.dispatch.exchange.orders import order_of
from moesaic.errors import DeadlineExceeded, MoesaicError


async def test_rows_of_neighbours_and_own_ones_may_be_under_way_at_once(open_lab: Any) -> None:
    """Both counted their frames from 1, over the same links."""
    async with open_lab("inprocess", ["a"], ["x", "x"], "case-2") as lab:
        worker, go = lab.attention[0], asyncio.Event()
        dispatcher, exchange = worker.dispatcher, worker.exchange
        for link in [link for expert in lab.experts for link in expert.network._links._served]:
            answer = link._handler

            async def waits(request: Any, answer: Any = answer) -> Any:
                await go.wait()
                reply = answer(request)
                return await reply if inspect.isawaitable(reply) else reply

            link._handler = waits
        dispatcher._seq = itertools.count(1)
        step, hidden = dispatcher.begin_step(), lab.rows(3, 0, 0)
        reach, nodes = step.route, exchange._nodes_of(step.route, 0)
        ways = [("case-1", 3.0), ("case-2", 3.0)]
        asking = asyncio.gather(
            dispatcher._directly(step, 0, hidden),
            *(exchange._sender.send(way, reach, 0, nodes, hidden, s) for way, s in ways),
        )
        await asyncio.sleep(0.05)
        go.set()

        directly, *sums = await asking

        assert all(torch.equal(each, directly) for each in sums)
        dispatcher.end_step(step)


async def test_a_dial_that_fails_oddly_is_not_repeated_for_every_layer() -> None:
    class Odd:
        dials = 0

        async def connect(self, *_: Any) -> Any:
            self.dials += 1
            raise RuntimeError("of any kind")

    odd = Odd()
    contacts, contact = Contacts(odd), Contact("a", 1, "nowhere")  # type: ignore[arg-type]

    for _ in range(5):
        with pytest.raises(MoesaicError):
            await contacts.reach(contact, 5.0)

    assert odd.dials == 1


async def test_rows_that_are_lost_cost_no_link_between_colleagues(open_lab: Any) -> None:
    """Who collects gave up on its colleague just when that was about to say that nothing had come."""
    async with open_lab("inprocess", ["a"], ["x", "x"], "case-1", timeout_s=0.5) as lab:
        await lab.check([3])
        await lab.check([3])  # each has collected once
        links = [link for e in lab.experts for link in e.relay._contacts._links.values()]
        assert len(links) == 2
        for link in lab.attention[0].dispatcher._links._links.values():
            link.post = lambda frame: None
        lab.attention[0].exchange._steps.direct_until_s = 0.0

        await lab.check([3])

        assert all(link.alive for link in links)


async def test_finding_colleagues_is_part_of_a_relays_time(open_lab: Any) -> None:
    async with open_lab("inprocess", ["a"], ["x", "x"], "case-2") as lab:
        left_s = []
        for expert in lab.experts:
            relay = expert.relay
            reach, exchange = relay._contacts.reach, relay._network.exchange

            async def slowly(contact: Any, deadline_s: float, reach: Any = reach) -> Any:
                await asyncio.sleep(0.2)
                return await reach(contact, deadline_s)

            async def noted(calls: Any, deadline_s: float, exchange: Any = exchange) -> Any:
                left_s.append(deadline_s)
                return await exchange(calls, deadline_s)

            relay._contacts.reach, relay._network.exchange = slowly, noted

        await lab.check([3])

        assert left_s
        assert max(left_s) <= 0.7 * 5.0 - 0.19


async def test_a_trip_that_fails_says_nothing_about_how_long_they_take(
    open_lab: Any, count: Callable[..., float]
) -> None:
    """After one that took its whole deadline, the next ones were waited for that long as well."""
    async with open_lab("inprocess", ["a", "a"], ["x", "x"], "case-2") as lab:
        await lab.step(1, 4)
        offering, lost = lab.attention[1].exchange._offering, []
        exchange = offering._network.exchange

        async def fails(calls: Any, deadline_s: float) -> Any:
            if any(order_of(frame) for _, frame in calls):
                lost.append(deadline_s)
                await asyncio.sleep(0.2)
                return [DeadlineExceeded("a test", 1.0)]
            return await exchange(calls, deadline_s)

        before = dict(offering._trip_s)
        offering._network.exchange = fails
        lab.attention[1].exchange._steps._alone_until_s = {}
        await lab.step(1, 4)
        while offering._asking:
            await asyncio.sleep(0.01)

        assert lost
        assert offering._trip_s == before


async def test_who_gathers_is_waited_for_no_longer_than_an_exchange_may_take(
    open_lab: Any, count: Callable[..., float]
) -> None:
    async with open_lab("inprocess", ["a", "a"], ["x", "x"], "case-2", timeout_s=0.2) as lab:
        await lab.step(1, 4)
        second = lab.attention[1].exchange
        second._offering._trip_s = dict.fromkeys(range(64), 3600.0)
        second._steps._alone_until_s = {}

        async def hangs(request: Any) -> Any:
            await asyncio.Event().wait()

        for link in lab.attention[0].network._links._served:
            link._handler = hangs
        before = count(metrics.FALLBACKS, "stalled")

        await lab.check([4, 4])

        assert count(metrics.FALLBACKS, "stalled") > before


async def test_links_are_measured_again_after_a_failure_of_any_kind(
    open_lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another version answered could not be read, and nothing was ever measured again."""
    from moesaic.dispatch.exchange import judge

    tried: list[int] = []
    measure_links = judge.measure_links

    async def fails_once(*arguments: Any) -> Any:
        tried.append(1)
        if len(tried) == 1:
            raise ValueError("of any kind")
        return await measure_links(*arguments)

    monkeypatch.setattr(judge, "measure_links", fails_once)
    monkeypatch.setattr(attending, "_RETRY_S", (0.01, 0.01))
    monkeypatch.setattr(attending, "ATTEND_EVERY_S", 0.01)
    async with open_lab("inprocess", ["a"], ["x", "x"], "auto") as lab:
        await lab.check([4])

        await lab.measured()

        assert len(tried) == 2


async def test_attention_workers_measure_one_after_the_other(
    open_lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All at once, each found a part of the rate that a link has."""
    from moesaic.dispatch.exchange import judge

    at_once, most = [], []
    measure_links = judge.measure_links

    async def counted(*arguments: Any) -> Any:
        at_once.append(1)
        most.append(len(at_once))
        try:
            await asyncio.sleep(0.05)
            return await measure_links(*arguments)
        finally:
            at_once.pop()

    monkeypatch.setattr(judge, "measure_links", counted)
    async with open_lab("inprocess", ["a", "b", "c"], ["x", "x", "y"], "auto") as lab:
        await lab.check([4, 4, 4])

        await lab.measured()

        assert len(most) == 3
        assert max(most) == 1


async def test_workers_of_all_nodes_keep_time_with_each_other(
    open_lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_lab("inprocess", ["a", "b"], ["x", "x"], "auto") as lab:
        await lab.check([4, 4])
        await lab.measured()
        trials = [None]

        while None in trials:
            await asyncio.gather(lab.step(0, 4), lab.step(1, 4))
            await asyncio.sleep(0.005)
            trials = [worker.exchange._attendance._trial for worker in lab.attention]

        assert trials[0] == trials[1]
        offsets = [worker.exchange._attendance._offset_s for worker in lab.attention]
        assert offsets == pytest.approx([0.0, 0.0], abs=0.5)  # one process, one clock
        assert lab.attention[0].exchange._judge.senders == 2


async def test_what_is_learned_outlives_a_placement(open_lab: Any) -> None:
    async with open_lab("inprocess", ["a"], ["x", "x"], "auto") as lab:
        await lab.check([4])
        await lab.measured()
        await lab.check([4])
        kinds = set(lab.attention[0].exchange._judge.chooser._kinds)

        lab.place(epoch=2)
        await lab.linked()
        await lab.check([4])

        assert set(lab.attention[0].exchange._judge.chooser._kinds) == kinds


async def test_one_without_rows_still_says_that_going_directly_is_faster(open_lab: Any) -> None:
    async with open_lab("inprocess", ["a", "a", "a"], ["x", "x"], "auto") as lab:
        await lab.check([4, 4, 4])
        await lab.measured()
        first = lab.attention[0].exchange
        seconds = {"direct": 1.0, "case-1": 2.0, "case-2": 3.0}
        first._judge.choose = lambda question, slot: Choice("direct", seconds)
        for worker in lab.attention:
            worker.exchange._steps.direct_until_s, worker.exchange._steps._alone_until_s = 0.0, {}
        first._gathering._regulars = {0: {"attention-1", "attention-2"}}

        await asyncio.gather(lab.step(1, 4), lab.step(2, 4))

        now_s = asyncio.get_running_loop().time()
        assert first._steps.direct_until_s > now_s - 0.5
        assert max(w.exchange._steps.direct_until_s for w in lab.attention[1:]) > 0.0


@pytest.mark.parametrize("mode", ["case-1", "case-2", "auto"])
async def test_no_rows_are_rows_too(open_lab: Any, mode: str) -> None:
    async with open_lab("inprocess", ["a", "a"], ["x", "x", "y"], mode) as lab:
        await lab.check([0, 3])
        await lab.check([0, 0])
        if mode == "auto":
            await lab.measured()
            await lab.check([0, 3])
            await lab.check([0, 0])


async def test_rows_that_should_go_directly_are_declined_at_once(
    open_lab: Any, count: Callable[..., float]
) -> None:
    async with open_lab("inprocess", ["a", "a"], ["x", "x"], "case-2") as lab:
        await lab.meet_up()
        first, second = (worker.exchange._steps for worker in lab.attention)
        first.direct_until_s = asyncio.get_running_loop().time() + 3600
        rounds, failed = (
            count(metrics.ROUNDS, "case-2", "told"),
            count(metrics.FALLBACKS, "bad_frame"),
        )

        found = await lab.step(1, 4)

        for got, expected in zip(found, await lab.expected(1, 4), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        assert count(metrics.ROUNDS, "case-2", "told") == rounds
        assert count(metrics.FALLBACKS, "bad_frame") == failed
        assert second.direct_until_s > asyncio.get_running_loop().time() + 1800
