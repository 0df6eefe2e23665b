"""One broken worker, one impossible action or one dead scheduler does not stop the others."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest
from msgspec.structs import replace

from moesaic.cluster.placements import encode_placement
from moesaic.errors import CheckpointError
from moesaic.messages.placement import Placement
from moesaic.v1 import scheduler_pb2 as pb

BROKEN = CheckpointError("model.safetensors", "is cut short")


def names(placement: Placement) -> list[str]:
    return [worker.worker_id for worker in placement.workers]


async def decisions(stub: Any) -> Any:
    return (await stub.GetDecisions(pb.GetDecisionsRequest())).decisions


async def test_a_newcomer_that_cannot_load_does_not_keep_lost_experts_from_others(suite):
    scheduler = await suite.scheduler()
    async with suite.expert("a"), AsyncExitStack() as life_of_b:
        await life_of_b.enter_async_context(suite.expert("b"))
        first = await suite.until_epoch(1)
        async with suite.expert("d") as d:
            second = await d.until_epoch(2)
            async with suite.expert("c", fail_with=BROKEN) as c:
                await scheduler.until("placement.failed")
                await life_of_b.aclose()
                placement = await d.until_epoch(3)

                assert (names(first), names(second)) == (["a", "b"], ["a", "b", "d"])
                assert names(placement) == ["a", "d"]
                assert c.epoch == 0


@pytest.mark.slow
async def test_a_newcomer_that_cannot_load_does_not_keep_others_from_leaving(suite):
    scheduler = await suite.scheduler()
    async with suite.expert("a", slots=8) as a, suite.expert("b", slots=8) as b:
        first = await b.until_epoch(1)
        async with suite.expert("c", slots=8, fail_with=BROKEN), scheduler.stub() as stub:
            text = "expert worker c: came back often or cannot load"
            while not any(
                wait.startswith(text)
                for wait in (await stub.GetFleet(pb.GetFleetRequest())).waiting_for
            ):
                await asyncio.sleep(0.05)
            await b.lease.update(state="draining")

            assert names(await a.until_epoch(first.epoch + 1)) == ["a"]


@pytest.mark.timeout(50)  # it would be left alone for a minute
async def test_a_worker_that_drains_leaves_though_who_replaces_it_came_back_often(suite):
    scheduler = await suite.scheduler()
    async with suite.expert("a") as a, suite.expert("b") as b:
        await b.until_epoch(1)
        for start in range(7):
            async with suite.expert("c") as c:
                await scheduler.until("worker.joined", worker_id="c", generation=c.generation)
                if start < 2:
                    await c.until_epoch(1)
        async with suite.expert("c") as c:
            await scheduler.until("worker.joined", worker_id="c", generation=c.generation)
            await b.lease.update(state="draining")
            while names(await a.until_epoch(1)) != ["a", "c"]:
                await asyncio.sleep(0.05)


async def test_a_worker_that_does_not_answer_does_not_hold_up_what_another_needs(suite):
    scheduler = await suite.scheduler()
    async with suite.expert("a", slots=8) as a, suite.expert("b", slots=8) as b:
        async with suite.expert("c", slots=8) as c:
            first = await a.until_epoch(1)
            while len(first.workers) < 3:
                first = await a.until_epoch(first.epoch + 1)
            await b.until_epoch(first.epoch)
            await c.until_epoch(first.epoch)
            await scheduler.kill()
            b.epoch, b.prepared = 0, {}  # as if it had not been told
            b.hangs_on = {first.epoch}
            b.asked_to_prepare.clear()
            await suite.scheduler()
            await b.asked_to_prepare.wait()

        assert names(await b.until_epoch(first.epoch + 1)) == ["a", "b"]


async def test_a_pin_that_memory_has_no_room_for_stops_neither_repair_nor_plans(suite):
    scheduler = await suite.scheduler()
    tight = {"expert_bytes": 10, "max_expert_bytes": 120}  # six experts of two layers
    async with suite.expert("a", slots=6, **tight) as a, scheduler.stub() as stub:
        async with suite.expert("b") as b:
            first = await b.until_epoch(1)
            pin = pb.Pin(expert=first.slots[0][1][0], worker_id="a")
            request = pb.SchedulerServiceSetPolicyRequest(add_pins=[pin])
            await stub.SetPolicy(request)
            while not any(
                "or no memory, to give to expert" in wait
                for wait in (await stub.GetFleet(pb.GetFleetRequest())).waiting_for
            ):
                await asyncio.sleep(0.05)
            assert await suite.until_epoch(1) == first
        async with suite.expert("b") as again:  # has lost what it held
            placement = await again.until_epoch(first.epoch + 1)
        assert placement.slots == first.slots
        await a.until_epoch(placement.epoch)
        assert "operator" not in {decision.cause for decision in await decisions(stub)}


async def test_what_a_scheduler_died_in_the_middle_of_is_said_by_the_next_one(suite):
    scheduler = await suite.scheduler()
    async with suite.expert("a") as a, suite.expert("b") as b:
        first = await a.until_epoch(1)
        await b.until_epoch(1)
        b.may_prepare.clear()
        b.asked_to_prepare.clear()
        swapped = replace(first, slots=[[[4, 1, 2, 3], [0, 5, 6, 7]], first.slots[1]])
        async with scheduler.stub() as stub:
            request = pb.ApplyPlacementRequest(placement=encode_placement(swapped), base_epoch=1)
            applying = asyncio.ensure_future(stub.ApplyPlacement(request))
            await b.asked_to_prepare.wait()
            (under_way, *_) = await decisions(stub)
            assert (under_way.cause, under_way.epoch, under_way.failure) == ("operator", 0, "")
            await scheduler.kill()
            with pytest.raises(grpc.aio.AioRpcError):
                await applying
        b.may_prepare.set()

        successor = await suite.scheduler()
        async with successor.stub() as stub:
            while not (ended := (await decisions(stub))[0]).failure:
                await asyncio.sleep(0.05)
            assert ended.decision_id == under_way.decision_id
            assert ended.failure == "its scheduler ended before it was done"
    assert suite.view.epoch == 1


async def test_a_standby_shows_the_policy_that_is_in_force(suite):
    leader = await suite.scheduler(worker_id="s-1")
    await leader.until("leader.changed", leads=True)
    standby = await suite.scheduler(worker_id="s-2")
    async with leader.stub() as stub, standby.stub() as other:
        pin = pb.Pin(expert=3, worker_id="a")
        request = pb.SchedulerServiceSetPolicyRequest(policy="keep", add_pins=[pin, pin])
        await stub.SetPolicy(request)

        found = await other.GetDecisions(pb.GetDecisionsRequest())

        assert (found.policy, list(found.pins)) == ("keep", [pin])


@pytest.mark.slow
async def test_a_placement_that_would_not_last_is_not_applied(suite):
    scheduler = await suite.scheduler()
    async with suite.expert("a", slots=8), suite.expert("b", slots=8) as b:
        first = await b.until_epoch(1)
        only_a = replace(
            first, workers=first.workers[:1], slots=[[list(range(8))] for _ in first.layers]
        )
        async with scheduler.stub() as stub:
            request = pb.ApplyPlacementRequest(
                placement=encode_placement(only_a), base_epoch=first.epoch
            )
            with pytest.raises(grpc.aio.AioRpcError, match="must be the placed workers: a, b"):
                await stub.ApplyPlacement(request)
        assert await suite.until_epoch(1) == first


@pytest.mark.slow
async def test_a_pin_that_cannot_be_loaded_is_not_tried_over_and_over(suite):
    scheduler = await suite.scheduler("--replan-interval-s", "3600")
    async with suite.expert("a", slots=5) as a, suite.expert("b", slots=5) as b:
        first = await b.until_epoch(1)
        a.fail_with = BROKEN
        async with scheduler.stub() as stub:
            (expert, *_) = set(first.slots[0][1]) - set(first.slots[0][0])
            request = pb.SchedulerServiceSetPolicyRequest(
                add_pins=[pb.Pin(expert=expert, worker_id="a")]
            )
            await stub.SetPolicy(request)
            await scheduler.until("placement.failed")
            # The step that says so tries what it can before it lets an operator's placement in.
            said = f"to give to expert {expert}, which is pinned to it"
            while not any(
                said in wait for wait in (await stub.GetFleet(pb.GetFleetRequest())).waiting_for
            ):
                await asyncio.sleep(0.05)
            same = pb.ApplyPlacementRequest(
                placement=encode_placement(first), base_epoch=first.epoch
            )
            assert (await stub.ApplyPlacement(same)).decision_id == ""

            tried = [d for d in await decisions(stub) if d.cause == "operator"]
            assert [d.failure for d in tried] == ["model.safetensors: is cut short"]
