"""Rows in two phases bring the sums of local experts, and the very bits of going directly, whatever happens."""

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import torch
from msgspec.structs import replace

from benchmarks.common.placements import placed_worker
from moesaic.dispatch.two_phase import metrics
from moesaic.dispatch.two_phase.messages import Relay, encode
from moesaic.dispatch.two_phase.way import MANY_ROWS, WAYS
from moesaic.errors import InvalidInput, MoesaicError
from moesaic.transport.frame import Frame, FrameKind
from tests.dispatch import dispatcher_contract as contract
from tests.dispatch.conftest import TIMEOUT_S, value_of
from tests.dispatch.two_phase.conftest import offer_again

NODES = ["a", "a"], ["x", "x", "y"]
SHAPES = [
    (["a"], ["x", "x"]),  # A < E
    (["a", "a"], ["x", "x"]),  # A = E
    (["a", "a", "a"], ["x", "x"]),  # A > E
    (["a", "a", "b"], ["x", "x", "y"]),  # nodes of different sizes
    (["a", "a", "b", "b"], ["x", "x", "y", "y"]),
    (["a", "b"], ["x", "y"]),  # a worker each: nothing to bring together
    (["a", "a"], ["x", "a", "x", "a"]),  # experts on the own node as well, and in between
    (["a", "a"], ["", "", ""]),  # nodes of their own
]


@pytest.fixture(params=["auto", "direct", "reduce", "relay"])
def any_mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class TestTwoPhases(
    contract.DispatcherContract,
    contract.OwnStepsContract,
    contract.BatchesAtOnceContract,
    contract.RemoteContract,
):
    """Of a worker whose rows another one brings together."""

    @pytest.fixture
    async def opened(self, open_lab: Any, any_mode: str) -> AsyncIterator[contract.Opened]:
        async with open_lab("inprocess", *NODES, any_mode) as lab:
            dispatcher, lose = lab.attention[1].dispatcher, lab.experts[2].network.close
            yield contract.Opened(dispatcher, lab.local, lab.config, False, lose, "expert-2")

    @pytest.fixture
    async def unreached(self, open_lab: Any) -> AsyncIterator[contract.Unreached]:
        async with open_lab("inprocess", *NODES, "relay", placed=False) as lab:

            async def come() -> None:
                lab.place()

            yield contract.Unreached(
                lab.attention[1].dispatcher, "a placement from the scheduler", come
            )


@pytest.mark.parametrize("mode", ["reduce", "relay", "direct"])
@pytest.mark.parametrize(("attention", "experts"), SHAPES)
async def test_any_shape_gives_the_sums_of_local_experts(
    open_lab: Any, attention: list[str], experts: list[str], mode: str
) -> None:
    async with open_lab("inprocess", attention, experts, mode) as lab:
        await lab.check([3 + 2 * n for n in range(len(attention))])
        await lab.check([1] * len(attention), seed=50)


@pytest.mark.parametrize("mode", ["reduce", "relay"])
@pytest.mark.parametrize("kind", ["shm", "tcp"])
async def test_real_links_carry_the_same_bits(open_lab: Any, kind: str, mode: str) -> None:
    async with open_lab(kind, ["a", "a", "b"], ["x", "x", "y", "y"], mode) as lab:
        await lab.check([64, 5, 17])
        await lab.check([1, 300, 2], seed=9)


@pytest.mark.parametrize(("mode", "there_and_back"), [("reduce", 4 + 2), ("relay", 2 + 2)])
async def test_workers_that_step_together_share_their_messages(
    open_lab: Any,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    there_and_back: int,
) -> None:
    monkeypatch.setattr("moesaic.dispatch.two_phase.dispatcher._ALONE_S", 0.0)
    async with open_lab("inprocess", ["a", "a"], ["x", "x", "y", "y"], mode) as lab:
        await lab.meet_up()
        monkeypatch.setattr("moesaic.dispatch.two_phase.waiting._PATIENCE_S", (60.0, 60.0))
        before = value_of(metrics.MESSAGES, "inter")

        await asyncio.gather(lab.step(0, 4), lab.step(1, 4))

        per_layer = (value_of(metrics.MESSAGES, "inter") - before) / len(lab.config.moe_layers)
        assert per_layer == there_and_back  # directly: 2 x 4 there and as many back


async def test_a_worker_without_rows_is_waited_for_once(
    open_lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moesaic.dispatch.two_phase.dispatcher._ALONE_S", 0.0)
    async with open_lab("inprocess", ["a", "a"], ["x", "x"], "relay") as lab:
        await lab.meet_up()
        waits = lab.attention[0].two_phase.waits

        await lab.step(0, 4)

        assert waits.regulars == {"attention-0"}
        await lab.check([4, 4])


async def test_a_worker_whose_lead_has_no_rows_goes_on_alone(open_lab: Any) -> None:
    async with open_lab("inprocess", ["a", "a"], ["x", "x"], "reduce") as lab:
        await lab.step(1, 4)

        assert lab.attention[1].two_phase.steps.is_alone(first=False, now_s=math.inf)
        for got, expected in zip(await lab.step(1, 4), await lab.expected(1, 4), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", ["reduce", "relay"])
async def test_an_attention_worker_comes_and_goes_in_the_middle(open_lab: Any, mode: str) -> None:
    async with open_lab("tcp", ["a", "a"], ["x", "x"], mode) as lab:
        await lab.check([4, 6])

        await lab.add_attention(2, "a")
        lab.meet()
        lab.attention[2].dispatcher.set_placement(lab.experts[0].host.epochs.placement(1))
        await lab.linked()
        await lab.check([4, 6, 3])

        gone = lab.attention.pop(0)  # which has gathered the rows
        stepping = asyncio.gather(lab.step(0, 6, seed=1), lab.step(1, 3, seed=1))
        await gone.dispatcher.close()
        await gone.network.close()
        found = await stepping
        for worker, (rows, seed) in enumerate([(6, 1), (3, 1)]):
            for got, expected in zip(
                found[worker], await lab.expected(worker, rows, seed), strict=True
            ):
                torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        lab.meet()
        await lab.check([4, 4])


async def test_a_new_epoch_in_the_middle_of_a_step(open_lab: Any) -> None:
    async with open_lab("inprocess", ["a", "a"], ["x", "x"], "relay") as lab:
        dispatcher = lab.attention[1].dispatcher
        step = dispatcher.begin_step()
        lab.place(epoch=2)
        hidden = lab.rows(4, 1, 0)

        got = await dispatcher.dispatch(step, 0, hidden)  # its neighbour is in the next epoch

        expected = await lab.local.dispatch(lab.local.begin_step(), 0, hidden)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        dispatcher.end_step(step)
        await lab.check([4, 4])


@pytest.mark.parametrize("mode", ["reduce", "relay"])
async def test_a_node_that_cannot_reach_itself_is_asked_directly(open_lab: Any, mode: str) -> None:
    async with open_lab("inprocess", ["a"], ["x", "x"], mode) as lab:
        for expert in lab.experts:
            expert.relay_over(lab.network(expert.name, b"another secret"))
        before = value_of(metrics.FALLBACKS, "worker_lost")

        await lab.check([5])

        assert value_of(metrics.FALLBACKS, "worker_lost") > before


@pytest.mark.parametrize("mode", ["reduce", "relay"])
async def test_colleagues_that_chose_other_experts_are_overruled(open_lab: Any, mode: str) -> None:
    async with open_lab("inprocess", ["a"], ["x", "x"], mode, crooked=[1]) as lab:
        await lab.check([5])


async def test_an_order_that_nobody_knows_is_refused(open_lab: Any) -> None:
    async with open_lab("inprocess", ["a"], ["x", "x"], "relay") as lab:
        body = msgspec.msgpack.encode({"type": "unknown"})
        request = Frame(kind=FrameKind.REQUEST, epoch=1, seq=1, body=body)
        link = next(iter(lab.attention[0].dispatcher.begin_step().route.links.values()))

        [outcome] = await lab.attention[0].network.exchange([(link, request)], TIMEOUT_S)

        assert isinstance(outcome, MoesaicError)
        assert link.alive


async def test_a_relay_asks_nobody_on_another_node(open_lab: Any) -> None:
    async with open_lab("inprocess", ["a"], ["x", "y"], "relay") as lab:
        for instances in ([0, 1], [1], [0, 7]):
            request = Frame(
                kind=FrameKind.REQUEST,
                epoch=1,
                seq=1,
                tensors=[torch.zeros(1, 32), torch.tensor([[0, 1]], dtype=torch.int32)],
                body=encode(Relay(instances, 1.0)),
            )
            with pytest.raises(InvalidInput):
                await lab.experts[0].relay.answer(request)


async def test_auto_sends_few_rows_of_a_node_directly(open_lab: Any) -> None:
    async with open_lab("inprocess", ["a", "a"], ["x", "x"], "auto") as lab:
        before = {way: value_of(metrics.ROUNDS, way) for way in WAYS}

        for seed in range(3):
            await lab.check([7, 8], seed)

        gone = {way for way in WAYS if value_of(metrics.ROUNDS, way) > before[way]}
        assert gone == {"direct"}


async def test_auto_brings_together_rows_that_are_many_only_together(
    open_lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moesaic.dispatch.two_phase.dispatcher._FEW_S", 0.0)
    monkeypatch.setattr("moesaic.dispatch.two_phase.steps._LATELY_S", 3600.0)
    async with open_lab("inprocess", ["a", "a"], ["x", "x"], "auto") as lab:
        failed = value_of(metrics.FALLBACKS, "not_ready")
        await lab.meet_up([8, 8])
        before = value_of(metrics.ROUNDS, "direct")

        await lab.check([8, 8])

        assert value_of(metrics.ROUNDS, "direct") == before
        # A lead that waits for rows of its own, sent directly, reaches the same workers.
        assert value_of(metrics.FALLBACKS, "not_ready") == failed


async def test_rows_of_the_lead_count_in_a_round_that_it_has_missed(
    open_lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moesaic.dispatch.two_phase.dispatcher._FEW_S", 0.0)
    monkeypatch.setattr("moesaic.dispatch.two_phase.steps._LATELY_S", 3600.0)
    async with open_lab("inprocess", ["a", "a"], ["x", "x"], "auto") as lab:
        await lab.step(0, MANY_ROWS - 1)
        before = value_of(metrics.ROUNDS, "relay")

        await lab.step(1, 1)

        assert value_of(metrics.ROUNDS, "relay") == before + len(lab.config.moe_layers)


async def test_the_last_layer_of_a_prompt_makes_no_rows_of_a_neighbour_few(
    open_lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moesaic.dispatch.two_phase.steps._LATELY_S", 3600.0)
    async with open_lab("inprocess", ["a", "a"], ["x", "x"], "auto") as lab:
        neighbour = lab.attention[1]
        step = neighbour.dispatcher.begin_step()
        for layer, rows in [(0, MANY_ROWS), (1, MANY_ROWS), (2, 1)]:
            offer_again(neighbour)
            await neighbour.dispatcher.dispatch(step, layer, lab.rows(rows, 1, layer))
        neighbour.dispatcher.end_step(step)
        before = value_of(metrics.ROUNDS, "direct")

        await lab.step(0, 1)

        assert value_of(metrics.ROUNDS, "direct") == before


async def test_a_worker_with_many_rows_is_relayed_though_its_lead_has_few(open_lab: Any) -> None:
    async with open_lab("inprocess", ["a", "a"], ["x", "x"], "auto") as lab:
        await lab.check([4, 4])
        assert lab.attention[0].two_phase.steps.few_until_s > 0
        before = value_of(metrics.ROUNDS, "relay")

        await lab.check([4, MANY_ROWS])

        assert value_of(metrics.ROUNDS, "relay") == before + len(lab.config.moe_layers)


async def test_a_step_goes_the_way_of_its_first_layer_to_its_end(open_lab: Any) -> None:
    """Of prompts only the last rows are in the last layer, and next steps should not think that they are few."""
    async with open_lab("inprocess", ["a"], ["x", "x"], "auto") as lab:
        dispatcher, before = lab.attention[0].dispatcher, value_of(metrics.ROUNDS, "relay")
        step = dispatcher.begin_step()

        for layer, rows in [(0, MANY_ROWS), (1, MANY_ROWS), (2, 1)]:
            await dispatcher.dispatch(step, layer, lab.rows(rows, 0, layer))

        assert value_of(metrics.ROUNDS, "relay") == before + 3
        assert lab.attention[0].two_phase.steps.few_until_s == 0.0
        dispatcher.end_step(step)


async def test_a_lead_without_rows_of_its_own_relays_those_of_others(open_lab: Any) -> None:
    async with open_lab("inprocess", ["a", "a"], ["x", "x"], "auto") as lab:
        before = value_of(metrics.ROUNDS, "relay")

        await lab.step(1, MANY_ROWS)

        assert value_of(metrics.ROUNDS, "relay") == before + len(lab.config.moe_layers)


async def test_one_node_alone_is_never_asked_in_two_phases(open_lab: Any) -> None:
    async with open_lab("inprocess", ["a", "a"], ["a", "a"], "auto") as lab:
        before = value_of(metrics.ROUNDS, "relay")

        await lab.check([MANY_ROWS, MANY_ROWS])

        assert value_of(metrics.ROUNDS, "relay") == before


def test_a_placement_of_before_reads_as_nodes_of_their_own() -> None:

    worker = placed_worker("w")

    assert worker.node_name != replace(worker, worker_id="v").node_name
    assert replace(worker, node="n").node_name == replace(worker, node="n", worker_id="v").node_name


async def test_who_went_directly_in_a_step_is_not_offered_in_the_middle_of_it(
    open_lab: Any,
) -> None:
    """Its neighbours are at other layers: nobody joined, and for a quarter of a second it stayed alone."""
    async with open_lab("inprocess", ["a", "a"], ["x", "x"], "relay") as lab:
        await lab.meet_up()
        second = lab.attention[1]
        second.two_phase.steps.direct_until_s = asyncio.get_running_loop().time() + 3600
        step, rows = second.dispatcher.begin_step(), lab.rows(4, 1, 0)
        await second.dispatcher.dispatch(step, 0, rows)
        second.two_phase.steps.direct_until_s = 0.0
        two_phases = value_of(metrics.ROUNDS, "relay")

        await second.dispatcher.dispatch(step, 1, rows)

        assert value_of(metrics.ROUNDS, "relay") == two_phases
        second.dispatcher.end_step(step)
        await lab.meet_up()


async def test_one_that_is_missed_by_a_worker_with_steps_is_alone_for_one_step_only(
    open_lab: Any,
) -> None:
    async with open_lab("inprocess", ["a", "a"], ["x", "x"], "relay") as lab:
        await lab.step(0, 4)

        await lab.step(1, 4)  # just too late

        second = lab.attention[1].two_phase.steps
        assert not second.is_alone(first=True, now_s=asyncio.get_running_loop().time())
