"""What goes wrong beside the sums: links stay, waits end, nobody is asked twice at once, upkeep goes on."""

import asyncio
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moesaic.dispatch.two_phase import metrics, upkeep
from moesaic.dispatch.two_phase.choice.chooser import RoundChoice
from moesaic.dispatch.two_phase.messages import order_of
from moesaic.errors import DeadlineExceeded


async def test_rows_of_neighbours_and_own_ones_may_be_under_way_at_once(open_lab: Any) -> None:
    """Both counted their frames from 1, over the same links."""
    async with open_lab("inprocess", ["a"], ["x", "x"], "relay") as lab:
        worker, go = lab.attention[0], asyncio.Event()
        dispatcher, two_phase = worker.dispatcher, worker.two_phase
        for link in [link for expert in lab.experts for link in expert.network._links._served]:
            answer = link._handler

            async def waits(request: Any, answer: Any = answer) -> Any:
                await go.wait()
                reply = answer(request)
                return await reply if inspect.isawaitable(reply) else reply

            link._handler = waits
        dispatcher._seq = itertools.count(1)
        step, hidden = dispatcher.begin_step(), lab.rows(3, 0, 0)
        reach, nodes = step.route, two_phase._nodes_of(step.route, 0)
        ways = [("reduce", 3.0), ("relay", 3.0)]
        asking = asyncio.gather(
            dispatcher._directly(step, 0, hidden),
            *(two_phase._sender.send(way, reach, 0, nodes, hidden, s) for way, s in ways),
        )
        await asyncio.sleep(0.05)
        go.set()

        directly, *sums = await asking

        assert all(torch.equal(each, directly) for each in sums)
        dispatcher.end_step(step)


async def test_rows_that_are_lost_cost_no_link_between_colleagues(open_lab: Any) -> None:
    """Who collects gave up on its colleague just when that was about to say that nothing had come."""
    async with open_lab("inprocess", ["a"], ["x", "x"], "reduce", timeout_s=0.5) as lab:
        await lab.check([3])
        await lab.check([3])  # each has collected once
        links = [link for e in lab.experts for link in e.relay._links._links.values()]
        assert len(links) == 2
        for link in lab.attention[0].dispatcher._routes._links._links.values():
            link.post = lambda frame: None
        lab.attention[0].two_phase._steps.direct_until_s = 0.0

        await lab.check([3])

        assert all(link.alive for link in links)


async def test_finding_colleagues_is_part_of_a_relays_time(open_lab: Any) -> None:
    async with open_lab("inprocess", ["a"], ["x", "x"], "relay") as lab:
        left_s = []
        for expert in lab.experts:
            relay = expert.relay
            reach, exchange = relay._links.reach, relay._network.exchange

            async def slowly(contact: Any, deadline_s: float, reach: Any = reach) -> Any:
                await asyncio.sleep(0.2)
                return await reach(contact, deadline_s)

            async def noted(calls: Any, deadline_s: float, exchange: Any = exchange) -> Any:
                left_s.append(deadline_s)
                return await exchange(calls, deadline_s)

            relay._links.reach, relay._network.exchange = slowly, noted

        await lab.check([3])

        assert left_s
        assert max(left_s) <= 0.7 * 5.0 - 0.19


async def test_a_trip_that_fails_says_nothing_about_how_long_they_take(
    open_lab: Any, count: Callable[..., float]
) -> None:
    """After one that took its whole deadline, the next ones were waited for that long as well."""
    async with open_lab("inprocess", ["a", "a"], ["x", "x"], "relay") as lab:
        await lab.step(1, 4)
        offering, lost = lab.attention[1].two_phase._joining, []
        exchange = offering._network.exchange

        async def fails(calls: Any, deadline_s: float) -> Any:
            if any(order_of(frame) for _, frame in calls):
                lost.append(deadline_s)
                await asyncio.sleep(0.2)
                return [DeadlineExceeded("a test", 1.0)]
            return await exchange(calls, deadline_s)

        before = dict(offering._trip_s)
        offering._network.exchange = fails
        lab.attention[1].two_phase._steps._alone_until_s = {}
        await lab.step(1, 4)
        while offering._asking:
            await asyncio.sleep(0.01)

        assert lost
        assert offering._trip_s == before


async def test_a_lead_is_waited_for_no_longer_than_a_layer_may_take(
    open_lab: Any, count: Callable[..., float]
) -> None:
    async with open_lab("inprocess", ["a", "a"], ["x", "x"], "relay", timeout_s=0.2) as lab:
        await lab.step(1, 4)
        second = lab.attention[1].two_phase
        second._joining._trip_s = dict.fromkeys(range(64), 3600.0)
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
    tried: list[int] = []
    measure_links = upkeep.measure_links

    async def fails_once(*arguments: Any) -> Any:
        tried.append(1)
        if len(tried) == 1:
            raise ValueError("of any kind")
        return await measure_links(*arguments)

    monkeypatch.setattr(upkeep, "measure_links", fails_once)
    monkeypatch.setattr(upkeep, "_RETRY_S", (0.01, 0.01))
    monkeypatch.setattr(upkeep, "_PAUSE_S", 0.01)
    async with open_lab("inprocess", ["a"], ["x", "x"], "auto") as lab:
        await lab.check([4])

        await lab.measured()

        assert len(tried) >= 2


async def test_links_are_not_measured_again_for_another_placement_of_the_same_workers(
    open_lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "_PAUSE_S", 0.01)
    async with open_lab("inprocess", ["a", "a"], ["x", "x"], "auto") as lab:
        first = lab.attention[0].two_phase
        while first.costs is None or not first.is_sure:
            await lab.check([4, 4])

        lab.place(epoch=2)
        await lab.linked()
        await lab.check([4, 4])

        assert first._upkeep._reach.placement.epoch == 2
        assert first.is_sure
        await lab.add_expert(2)
        lab.expert_nodes = [*lab.expert_nodes, "y"]
        lab.place(epoch=3)
        while first._upkeep._reach.placement.epoch < 3:
            await lab.check([4, 4])
        assert not first.is_sure


async def test_one_without_rows_still_says_that_going_directly_is_faster(open_lab: Any) -> None:
    async with open_lab("inprocess", ["a", "a", "a"], ["x", "x"], "auto") as lab:
        await lab.check([4, 4, 4])
        await lab.measured()
        first = lab.attention[0].two_phase
        seconds = {"direct": 1.0, "reduce": 2.0, "relay": 3.0}
        first._chooser.choose = lambda shape: RoundChoice("direct", "faster", seconds)
        for worker in lab.attention:
            worker.two_phase._steps.direct_until_s, worker.two_phase._steps._alone_until_s = 0.0, {}
        first._rounds.waits._regulars = {0: {"attention-1", "attention-2"}}

        await asyncio.gather(lab.step(1, 4), lab.step(2, 4))

        now_s = asyncio.get_running_loop().time()
        assert first._steps.direct_until_s > now_s - 0.5
        assert max(w.two_phase._steps.direct_until_s for w in lab.attention[1:]) > 0.0


@pytest.mark.parametrize("mode", ["reduce", "relay", "auto"])
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
    async with open_lab("inprocess", ["a", "a"], ["x", "x"], "relay") as lab:
        await lab.meet_up()
        first, second = (worker.two_phase._steps for worker in lab.attention)
        first.direct_until_s = asyncio.get_running_loop().time() + 3600
        rounds, failed = (
            count(metrics.ROUNDS, "relay", "told"),
            count(metrics.FALLBACKS, "bad_frame"),
        )

        found = await lab.step(1, 4)

        for got, expected in zip(found, await lab.expected(1, 4), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        assert count(metrics.ROUNDS, "relay", "told") == rounds
        assert count(metrics.FALLBACKS, "bad_frame") == failed
        assert second.direct_until_s > asyncio.get_running_loop().time() + 1800


async def test_a_round_that_goes_directly_is_declined_also_when_its_time_is_over(
    open_lab: Any, count: Callable[..., float]
) -> None:
    async with open_lab("inprocess", ["a", "a"], ["x", "x"], "relay") as lab:
        await lab.meet_up()
        leads = [worker.two_phase for worker in lab.attention]
        failed = count(metrics.FALLBACKS, "bad_frame")
        for two_phase in leads:

            async def declined(layer: int, contribution: Any) -> None:
                return None

            two_phase._rounds.join = declined

        found = await lab.step(1, 4)

        for got, expected in zip(found, await lab.expected(1, 4), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        assert count(metrics.FALLBACKS, "bad_frame") == failed
