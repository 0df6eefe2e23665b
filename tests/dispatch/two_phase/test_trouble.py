"""What goes wrong beside the sums: links stay, waits end, nobody is asked twice at once."""

import asyncio
import inspect
from typing import Any

import pytest
import torch

from moesaic.dispatch.two_phase import metrics
from moesaic.dispatch.two_phase.messages import order_of
from moesaic.dispatch.two_phase.nodes import Nodes
from moesaic.dispatch.two_phase.sending import RELAY_SHARE, Sender
from moesaic.dispatch.two_phase.way import MANY_ROWS
from moesaic.errors import DeadlineExceeded
from tests.dispatch.conftest import TIMEOUT_S, value_of
from tests.dispatch.two_phase.conftest import await_at_first_layers, offer_again
from tests.waiting import until


async def test_rows_of_neighbours_and_own_ones_may_be_under_way_at_once(open_lab: Any) -> None:
    """Both counted their frames from 1, over the same links."""
    async with open_lab("inprocess", ["a"], ["x", "x"], "relay") as lab:
        worker, go, came = lab.attention[0], asyncio.Event(), list[Any]()
        for expert in lab.experts:

            async def waits(request: Any, answer: Any = expert.answer) -> Any:
                came.append(request)
                await go.wait()
                reply = answer(request)
                return await reply if inspect.isawaitable(reply) else reply

            expert.answer = waits
        step, hidden = worker.dispatcher.begin_step(), lab.rows(3, 0, 0)
        nodes, sender = (
            Nodes.of(step.route, step.route.targets[0], "a"),
            Sender(worker.network, "own"),
        )
        ways = "reduce", "relay"
        asking = asyncio.gather(
            worker.plain.dispatch(step, 0, hidden),
            *(sender.send(way, step.route, 0, nodes, hidden, TIMEOUT_S) for way in ways),
        )
        await until(lambda: len(came) == 2 + 2 + 1)
        go.set()

        directly, *sums = await asking

        assert all(torch.equal(each, directly) for each in sums)
        worker.dispatcher.end_step(step)


async def test_rows_that_are_lost_cost_no_link_between_colleagues(open_lab: Any) -> None:
    """Who collects gave up on its colleague just when that was about to say that nothing had come."""
    # Only time ends this wait. It is as long as that a busy machine does not decide who is first.
    async with open_lab("inprocess", ["a"], ["x", "x"], "reduce", timeout_s=3.0) as lab:
        links: list[Any] = []
        for expert in lab.experts:

            async def connect(*where: Any, connect: Any = expert.network.connect) -> Any:
                links.append(await connect(*where))
                return links[-1]

            expert.network.connect = connect
        await lab.check([3])
        await lab.check([3])  # each has collected once
        assert len(links) == 2
        for link in lab.attention[0].dispatcher.route_of(1).links.values():
            link.post = lambda frame: None
        lab.attention[0].two_phase.steps.direct_until_s = 0.0
        before = value_of(metrics.FALLBACKS, "expert_unavailable")

        await lab.check([3])

        assert value_of(metrics.FALLBACKS, "expert_unavailable") > before
        assert all(link.alive for link in links)


async def test_finding_colleagues_is_part_of_a_relays_time(open_lab: Any) -> None:
    async with open_lab("inprocess", ["a"], ["x", "x"], "relay") as lab:
        left_s = []
        for expert in lab.experts:
            network = expert.network

            async def slowly(*where: Any, connect: Any = network.connect) -> Any:
                await asyncio.sleep(0.1)  # the time that is tested
                return await connect(*where)

            async def noted(calls: Any, deadline_s: float, exchange: Any = network.exchange) -> Any:
                left_s.append(deadline_s)
                return await exchange(calls, deadline_s)

            network.connect, network.exchange = slowly, noted

        await lab.check([3])

        # Each of them finds the other once.
        assert max(left_s[: len(lab.experts)]) <= RELAY_SHARE * TIMEOUT_S - 0.09


async def test_a_trip_that_fails_says_nothing_about_how_long_they_take(open_lab: Any) -> None:
    """After one that took its whole deadline, the next ones were waited for that long as well."""
    async with open_lab("inprocess", ["a", "a"], ["x", "x"], "relay") as lab:
        await lab.step(1, 4)
        second, lost = lab.attention[1], []
        exchange, before = second.network.exchange, second.two_phase.trips.usual_s(4)

        async def fails(calls: Any, deadline_s: float) -> Any:
            if any(order_of(frame) for _, frame in calls):
                lost.append(deadline_s)
                return [DeadlineExceeded("a test", 1.0)]
            return await exchange(calls, deadline_s)

        second.network.exchange = fails
        offer_again(second)
        await lab.step(1, 4)

        assert lost
        assert second.two_phase.trips.usual_s(4) == before


async def test_a_lead_is_waited_for_no_longer_than_a_layer_may_take(open_lab: Any) -> None:
    async with open_lab("inprocess", ["a", "a"], ["x", "x"], "relay", timeout_s=0.2) as lab:
        await lab.step(1, 4)
        second = lab.attention[1]
        second.two_phase.trips.took(4, 3600.0)
        offer_again(second)

        async def hangs(request: Any) -> Any:
            await asyncio.Event().wait()

        lab.attention[0].answer = hangs
        before = value_of(metrics.FALLBACKS, "stalled")

        await lab.check([4, 4])

        assert value_of(metrics.FALLBACKS, "stalled") > before


async def test_one_without_rows_still_says_that_the_rows_of_its_node_are_few(open_lab: Any) -> None:
    async with open_lab("inprocess", ["a", "a", "a"], ["x", "x"], "auto") as lab:
        first, *others = (worker.two_phase for worker in lab.attention)
        await_at_first_layers(first.waits, ["attention-1", "attention-2"])

        await asyncio.gather(lab.step(1, 4), lab.step(2, 4))

        assert first.steps.few_until_s > 0.0
        assert max(each.steps.few_until_s for each in others) > 0.0


async def test_one_whose_few_rows_nobody_joined_sends_the_next_ones_directly_too(
    open_lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moesaic.dispatch.two_phase.dispatcher._FEW_S", 3600.0)
    async with open_lab("inprocess", ["a", "a"], ["x", "x"], "auto") as lab:
        await lab.step(1, 4)

        until_s = lab.attention[1].two_phase.steps.few_until_s
        assert until_s > asyncio.get_running_loop().time() + 1800


@pytest.mark.parametrize("worker", [0, 1])
async def test_rows_that_are_many_by_now_are_brought_together_at_once(
    open_lab: Any, monkeypatch: pytest.MonkeyPatch, worker: int
) -> None:
    """Of the lead itself, or of a neighbour."""
    monkeypatch.setattr("moesaic.dispatch.two_phase.dispatcher._FEW_S", 3600.0)
    async with open_lab("inprocess", ["a", "a"], ["x", "x"], "auto") as lab:
        await lab.step(0, 4)
        lead = lab.attention[0].two_phase.steps
        assert lead.few_until_s > 0

        await lab.step(worker, MANY_ROWS)

        assert lead.few_until_s == 0


@pytest.mark.parametrize("mode", ["reduce", "relay", "auto"])
async def test_no_rows_are_rows_too(open_lab: Any, mode: str) -> None:
    async with open_lab("inprocess", ["a", "a"], ["x", "x", "y"], mode) as lab:
        await lab.check([0, 3])
        await lab.check([0, 0])


async def test_rows_that_should_go_directly_are_declined_at_once(open_lab: Any) -> None:
    async with open_lab("inprocess", ["a", "a"], ["x", "x"], "relay") as lab:
        await lab.meet_up()
        first, second = (worker.two_phase.steps for worker in lab.attention)
        first.direct_until_s = asyncio.get_running_loop().time() + 3600
        usual_s = lab.attention[1].two_phase.trips.usual_s(4)
        rounds, failed = (
            value_of(metrics.ROUNDS, "relay"),
            value_of(metrics.FALLBACKS, "bad_frame"),
        )

        found = await lab.step(1, 4)

        for got, expected in zip(found, await lab.expected(1, 4), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        assert value_of(metrics.ROUNDS, "relay") == rounds
        assert value_of(metrics.FALLBACKS, "bad_frame") == failed
        assert second.few_until_s > asyncio.get_running_loop().time() + 1800
        assert lab.attention[1].two_phase.trips.usual_s(4) == usual_s  # one with sums takes longer


async def test_a_round_that_goes_directly_is_declined_also_when_its_time_is_over(
    open_lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moesaic.dispatch.two_phase.dispatcher._FEW_S", 0.0)
    async with open_lab("inprocess", ["a", "a"], ["x", "x"], "auto") as lab:
        directly = value_of(metrics.ROUNDS, "direct")
        failed = value_of(metrics.FALLBACKS, "bad_frame")

        found = await lab.step(1, 4)

        for got, expected in zip(found, await lab.expected(1, 4), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        assert value_of(metrics.ROUNDS, "direct") == directly + len(found)
        assert value_of(metrics.FALLBACKS, "bad_frame") == failed
