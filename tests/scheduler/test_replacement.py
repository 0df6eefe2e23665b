"""Experts move by what traffic does and by what operators want, through every kind of trouble."""

import asyncio
import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
from msgspec.structs import replace

from moesaic.cluster.placements import encode_placement
from moesaic.messages.activation import (
    ActivationReport,
    ActivationWindow,
    LayerActivations,
    ServedBatches,
)
from moesaic.messages.decisions import PlacementPolicy
from moesaic.messages.placement import Placement
from moesaic.services.scheduler.versioned import PLACEMENT
from moesaic.v1 import scheduler_pb2 as pb

HOT = [4, 5, 6, 7]
BY_TRAFFIC = (*("--placement-policy", "eplb", "--replan-interval-s", "0.2"),)


def report(placement: Placement, epoch: int = 0, busiest: int = 4) -> ActivationReport:
    """64 batches in which the hot experts were active, in every layer."""
    worker = placement.workers[0]
    counts = [64 * (expert in HOT) for expert in range(placement.num_experts)]
    layers = [
        LayerActivations(
            layer=layer,
            rows=64,
            batches=64,
            tokens=counts,
            active_batches=counts,
            sampled=[bytes([0, 0] * 4 + [1, 0] * 4)] * 32,  # rows of each expert
        )
        for layer in placement.layers
    ]
    window = ActivationWindow(
        worker_id=worker.worker_id,
        generation=worker.generation,
        model_digest=placement.model_digest,
        num_experts=placement.num_experts,
        epoch=epoch,
        window_s=1.0,
        layers=layers,
    )
    batches = 64 * len(layers)
    served = [ServedBatches(epoch=epoch, batches=batches, busiest=batches * busiest)] * bool(epoch)
    return ActivationReport(window=window, served=served)


def most_hot(placement: Placement) -> int:
    """The least possible largest number of hot experts on one worker, roughly: by holders."""
    layer = placement.slots[0]
    sole = [e for e in HOT if sum(e in slots for slots in layer) == 1]
    return max(len([e for e in slots if e in sole]) for slots in layer)


async def decisions(stub: Any) -> Any:
    return (await stub.GetDecisions(pb.GetDecisionsRequest())).decisions


async def test_experts_that_traffic_wants_get_replicas_and_the_gain_is_measured(suite):
    scheduler = await suite.scheduler(*BY_TRAFFIC)
    async with suite.expert("a"), suite.expert("b"), suite.expert("c") as c:
        first = await suite.until_epoch(1)
        while len(first.workers) < 3:
            first = await suite.until_epoch(first.epoch + 1)
        assert most_hot(first) == 4  # dealt evenly: b alone has all that is hot

        await suite.bus.append("ctl:activations", report(first))
        second = await c.until_epoch(first.epoch + 1)

        assert most_hot(second) <= 1
        async with scheduler.stub() as stub:
            for _ in range(2):
                await suite.bus.append("ctl:activations", report(first, second.epoch, busiest=2))
            while True:
                adopted = [d for d in await decisions(stub) if d.adopted and d.cause == "traffic"]
                if adopted and adopted[0].HasField("measured_after"):
                    break
                await asyncio.sleep(0.05)
            assert adopted[0].epoch == second.epoch
            assert adopted[0].policy == "eplb"
            assert adopted[0].predicted_before == 4
            assert adopted[0].predicted_after == 2
            assert adopted[0].measured_after == 2
            assert adopted[0].moves > 0
            seen = await stub.GetActivations(pb.SchedulerServiceGetActivationsRequest())
            assert list(seen.layers[0].tokens)[:4] == [0, 0, 0, 0]
            assert (seen.windows, seen.refused) == (3, 0)


async def test_statistics_that_make_no_sense_are_counted_and_change_nothing(suite):
    scheduler = await suite.scheduler(*BY_TRAFFIC)
    async with suite.expert("a", slots=8), suite.expert("b", slots=8):
        first = await suite.until_epoch(1)
        good = report(first)
        layer = good.window.layers[0]
        foreign = replace(good.window, model_digest="another")
        junk = [
            replace(good, window=foreign),
            replace(good, window=replace(good.window, worker_id="nobody")),
            replace(good, window=replace(good.window, layers=[replace(layer, layer=77)])),
            replace(good, window=replace(good.window, layers=[replace(layer, rows=2**62)])),
            replace(
                good,
                window=replace(good.window, layers=[replace(layer, tokens=[10**30 % 2**60] * 8)]),
            ),
            replace(good, window=replace(good.window, layers=[replace(layer, sampled=[b"xx"])])),
            replace(good, served=[ServedBatches(epoch=99, batches=1, busiest=1)]),
        ]
        async with scheduler.stub() as stub:
            for bad in junk:
                await suite.bus.append("ctl:activations", bad)
            for payload in (b"\xc1garbage", b""):
                await suite.bus.connection.client.xadd(
                    "moesaic:{test}:ctl:activations", {"t": "activation-report.v2", "p": payload}
                )
            request = pb.SchedulerServiceGetActivationsRequest()
            while (seen := await stub.GetActivations(request)).refused < len(junk):
                await asyncio.sleep(0.05)

            assert seen.windows == 0
            while await suite.bus.connection.client.xlen("moesaic:{test}:dlq:ctl:activations") < 2:
                await asyncio.sleep(0.05)
            plan = (await stub.Plan(pb.PlanRequest())).plan
            assert not plan.worthwhile
            assert plan.reason == "no traffic has been seen yet"
        assert suite.view.epoch == first.epoch


async def test_operators_apply_what_they_want_and_nothing_that_is_wrong_or_old(suite):
    scheduler = await suite.scheduler()
    await scheduler.until("leader.changed", leads=True)
    standby = await suite.scheduler(worker_id="s-2")
    async with suite.expert("a") as a, suite.expert("b") as b, scheduler.stub() as stub:
        first = await a.until_epoch(1)
        await b.until_epoch(1)

        async def apply(slots: list[list[int]], base_epoch: int = 1, to: Any = stub) -> Any:
            wanted = encode_placement(replace(first, slots=[slots, first.slots[1]]))
            request = pb.ApplyPlacementRequest(placement=wanted, base_epoch=base_epoch)
            return await to.ApplyPlacement(request)

        async def refusal(*arguments: Any, **more: Any) -> tuple[grpc.StatusCode, str]:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await apply(*arguments, **more)
            return refused.value.code(), str(refused.value.details())

        swapped = [[4, 1, 2, 3], [0, 5, 6, 7]]
        assert await refusal([[0, 1, 2, 3], [4, 5, 6, 6]]) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "placement: an expert twice: layer 1 of b; an expert without a replica: layer 1: [7]",
        )
        assert (await refusal([[0, 1, 2, 3, 4], [4, 5, 6, 7]]))[1].startswith(
            "placement: more slots than there are: layer 1 of a"
        )
        assert (await refusal(swapped, base_epoch=7))[0] is grpc.StatusCode.ABORTED
        async with standby.stub() as other:
            assert (await refusal(swapped, to=other))[1] == (
                "this scheduler does not lead; scheduler-0 does"
            )
        assert suite.view.epoch == 1

        done = await apply(swapped)
        assert done.epoch == 2
        assert (await a.until_epoch(2)).slots[0] == swapped
        again = await apply(swapped, base_epoch=2)
        assert (again.epoch, again.decision_id) == (2, "")
        assert [d.cause for d in await decisions(stub)][:1] == ["operator"]
        async with standby.stub() as other:
            assert [d.decision_id for d in await decisions(other)][:1] == [done.decision_id]


def solvers(scheduler: Any) -> list[int]:
    """The processes that solve for a scheduler."""
    pid = scheduler.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    found = []
    for child in map(int, children):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it may end meanwhile
            if b".solver" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(child)
    return found


async def stopped_solver(scheduler: Any) -> int:
    """Wait for a process that solves, and stop it: its plan takes long."""
    while not (solving := solvers(scheduler)):
        await asyncio.sleep(0.005)
    os.kill(solving[0], signal.SIGSTOP)
    return solving[0]


async def test_a_plan_that_takes_long_gives_way_to_operators(suite):
    scheduler = await suite.scheduler(*BY_TRAFFIC)
    async with suite.expert("a") as a, suite.expert("b") as b, scheduler.stub() as stub:
        first = await a.until_epoch(1)
        while len(first.workers) < 2:
            first = await a.until_epoch(first.epoch + 1)
        await b.until_epoch(first.epoch)
        await suite.bus.append("ctl:activations", report(first))

        solving = await stopped_solver(scheduler)
        slots = [[[4, 1, 2, 3], [0, 5, 6, 7]], first.slots[1]]
        request = pb.ApplyPlacementRequest(
            placement=encode_placement(replace(first, slots=slots)), base_epoch=first.epoch
        )
        await stub.ApplyPlacement(request)  # the solver would be waited for 20 s
        assert solving not in solvers(scheduler)

        solving = await stopped_solver(scheduler)
        request = pb.SchedulerServiceSetPolicyRequest(policy="keep")
        await stub.SetPolicy(request)
        while solving in solvers(scheduler):
            await asyncio.sleep(0.05)
        assert {d.cause for d in await decisions(stub)} <= {"workers", "operator"}
        assert (await a.until_epoch(first.epoch + 1)).slots == slots


async def test_a_pinned_expert_stays_where_it_is_wanted_whoever_leads(suite):
    scheduler = await suite.scheduler()
    pin = pb.Pin(layer=1, expert=7, worker_id="a")
    async with suite.expert("a", slots=5) as a, suite.expert("b", slots=5) as b:
        await a.until_epoch(1)
        first = await b.until_epoch(1)
        assert 7 not in first.slots[0][0]
        async with scheduler.stub() as stub:
            request = pb.SchedulerServiceSetPolicyRequest(add_pins=[pin], policy="keep")
            answer = await stub.SetPolicy(request)
            assert (answer.policy, list(answer.pins)) == ("keep", [pin])
            wrong = pb.SchedulerServiceSetPolicyRequest(add_pins=[pb.Pin(expert=8, worker_id="a")])
            with pytest.raises(grpc.aio.AioRpcError, match="must be below 8"):
                await stub.SetPolicy(wrong)
        second = await a.until_epoch(2)
        assert 7 in second.slots[0][0]
        assert second.slots[1] == first.slots[1]
        await scheduler.kill()

        successor = await suite.scheduler()
        async with successor.stub() as stub:
            while not (found := await stub.GetDecisions(pb.GetDecisionsRequest())).pins:
                await asyncio.sleep(0.05)
            assert (found.policy, list(found.pins)) == ("keep", [pin])
        async with suite.expert("c", slots=5) as c:
            third = await c.until_epoch(3)
        assert 7 in third.slots[0][0]


async def test_a_redis_that_lost_everything_gets_the_policy_back(suite):
    scheduler = await suite.scheduler()
    async with suite.expert("a", slots=8) as a, scheduler.stub() as stub:
        await a.until_epoch(1)
        request = pb.SchedulerServiceSetPolicyRequest(policy="eplb-batches")
        await stub.SetPolicy(request)
        suite.redis.kill(lose_data=True)
        suite.redis.start()
        await scheduler.until("placement.republished")
        policies = msgspec.msgpack.Decoder(PlacementPolicy)
        while (found := await suite.bus.get(PLACEMENT, policies)) is None:
            await asyncio.sleep(0.05)
        assert (found.policy, found.version > 0) == ("eplb-batches", True)
    assert suite.view.epoch == 1


async def test_what_does_not_fit_beside_old_experts_is_not_even_tried(suite):
    scheduler = await suite.scheduler()
    fields = {"expert_bytes": 10, "max_expert_bytes": 90}  # 8 experts, and one more
    async with (
        suite.expert("a", **fields) as a,
        suite.expert("b", **fields) as b,
        scheduler.stub() as stub,
    ):
        first = await a.until_epoch(1)
        await b.until_epoch(1)
        both = replace(first, slots=[[[4, 5, 2, 3], [0, 1, 6, 7]], first.slots[1]])
        with pytest.raises(grpc.aio.AioRpcError, match="would hold 100 bytes of experts"):
            await stub.ApplyPlacement(
                pb.ApplyPlacementRequest(placement=encode_placement(both), base_epoch=1)
            )
        one = replace(first, slots=[[[4, 1, 2, 3], [0, 5, 6, 7]], first.slots[1]])
        done = await stub.ApplyPlacement(
            pb.ApplyPlacementRequest(placement=encode_placement(one), base_epoch=1)
        )
        assert done.epoch == 2


async def test_a_successor_knows_the_traffic_of_the_last_minutes(suite):
    scheduler = await suite.scheduler("--placement-policy", "keep")
    async with suite.expert("a", slots=8), suite.expert("b", slots=8):
        first = await suite.until_epoch(1)
        while len(first.workers) < 2:
            first = await suite.until_epoch(first.epoch + 1)
        request = pb.SchedulerServiceGetActivationsRequest()
        for _ in range(2):
            await suite.bus.append("ctl:activations", report(first))
        async with scheduler.stub() as stub:
            while (await stub.GetActivations(request)).windows < 2:
                await asyncio.sleep(0.05)
        await scheduler.kill()

        successor = await suite.scheduler("--placement-policy", "keep")
        async with successor.stub() as stub:
            while (seen := await stub.GetActivations(request)).windows < 2:
                await asyncio.sleep(0.05)
            assert sum(seen.layers[0].tokens) == pytest.approx(2 * 64 * len(HOT), rel=0.2)


async def test_plans_to_stay_do_not_drive_what_was_done_out_of_the_log(suite):
    scheduler = await suite.scheduler(
        *("--placement-policy", "uniform", "--replan-interval-s", "0.05")
    )
    async with suite.expert("a", slots=8), suite.expert("b", slots=8), scheduler.stub() as stub:
        first = await suite.until_epoch(1)
        while len(first.workers) < 2:
            first = await suite.until_epoch(first.epoch + 1)
        await suite.bus.append("ctl:activations", report(first))
        while not any(decision.cause == "traffic" for decision in await decisions(stub)):
            await asyncio.sleep(0.05)
        await suite.bus.append("ctl:activations", report(first))
        # Only time brings more plans, and nobody tells of a plan to stay.
        await asyncio.sleep(2.5)

        assert [d.cause for d in await decisions(stub)].count("traffic") == 1
