import asyncio
import signal

import grpc
import pytest

from moesaic.cluster.placements import decode_placement
from moesaic.errors import CheckpointError
from moesaic.messages.placement import Placement
from moesaic.v1 import scheduler_pb2 as pb

SLOTS = [[[0, 1, 2, 3], [4, 5, 6, 7]]] * 2


def generations(placement: Placement) -> list[int]:
    return [worker.generation for worker in placement.workers]


async def test_the_first_placement_comes_when_the_slots_cover_all_experts(suite):
    scheduler = await suite.scheduler()
    async with suite.expert("a") as a, scheduler.stub() as stub:
        await scheduler.until("worker.joined", worker_id="a")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.GetPlacement(pb.GetPlacementRequest())
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
        while True:
            fleet = await stub.GetFleet(pb.GetFleetRequest())
            if fleet.waiting_for == ["expert workers: 4 of 8 slots per layer registered"]:
                break
        watch = stub.WatchPlacement(pb.WatchPlacementRequest())

        async with suite.expert("b") as b:
            placement = await suite.until_epoch(1)
            assert await a.until_epoch(1) == await b.until_epoch(1) == placement
            assert (placement.slots, placement.layers) == (SLOTS, [1, 2])
            assert generations(placement) == [a.generation, b.generation]
            answer = await stub.GetPlacement(pb.GetPlacementRequest())
            assert decode_placement(answer.placement) == placement
            assert decode_placement((await watch.read()).placement) == placement
            fleet = await stub.GetFleet(pb.GetFleetRequest())
            assert [w.worker_id for w in fleet.workers] == ["a", "b", "scheduler-0"]


async def test_a_restarted_worker_gets_its_slots_back_under_a_new_epoch(suite):
    await suite.scheduler()
    async with suite.expert("a") as a:
        async with suite.expert("b"):
            first = await suite.until_epoch(1)
        async with suite.expert("b") as restarted:
            second = await suite.until_epoch(2)
            await restarted.until_epoch(2)
            await a.until_epoch(2)

    assert second.slots == first.slots
    assert generations(second) == [a.generation, restarted.generation]


async def test_survivors_with_room_take_over_from_a_lost_worker(suite):
    await suite.scheduler()
    async with suite.expert("a", slots=8) as a:
        async with suite.expert("b", slots=8):
            await suite.until_epoch(1)
        placement = await a.until_epoch(2)

    assert [worker.worker_id for worker in placement.workers] == ["a"]
    assert placement.slots == [[list(range(8))]] * 2


async def test_a_draining_worker_is_placed_out_and_a_later_change_of_mind_places_it_again(suite):
    await suite.scheduler()
    async with suite.expert("a", slots=8) as a, suite.expert("b", slots=8) as b:
        first = await b.until_epoch(1)
        await b.lease.update(state="draining")
        without = await a.until_epoch(first.epoch + 1)
        await b.lease.update(state="ready")
        again = await b.until_epoch(first.epoch + 2)

    assert [worker.worker_id for worker in without.workers] == ["a"]
    assert [worker.worker_id for worker in again.workers] == ["a", "b"]


async def test_a_killed_scheduler_resumes_and_confirms_what_was_committed(suite):
    scheduler = await suite.scheduler()
    async with suite.expert("a") as a, suite.expert("b") as b:
        first = await suite.until_epoch(1)
        await a.until_epoch(1)
        await b.until_epoch(1)
        await scheduler.kill()
        b.epoch, b.prepared = 0, {}  # as if it had died before b was told

        await suite.scheduler()

        assert await b.until_epoch(1) == first
        assert suite.view.epoch == 1


async def test_a_scheduler_killed_while_workers_load_leaves_nothing_committed(suite):
    scheduler = await suite.scheduler()
    async with suite.expert("a") as a, suite.expert("b") as b:
        b.may_prepare.clear()
        await b.asked_to_prepare.wait()
        await scheduler.kill()
        assert suite.view.epoch == 0
        b.may_prepare.set()

        await suite.scheduler()

        assert (await a.until_epoch(2)).epoch == 2  # epoch 1 was given out and is never reused
        await b.until_epoch(2)


async def test_a_worker_that_cannot_load_stops_the_placement_and_it_is_tried_again(suite):
    scheduler = await suite.scheduler()
    async with suite.expert("a") as a, suite.expert("b") as b:
        b.fail_with = CheckpointError("model.safetensors", "is cut short")
        failed = await scheduler.until("placement.failed")
        assert "model.safetensors: is cut short" in failed["cause"]
        while 1 not in a.aborted:
            await asyncio.sleep(0.01)
        assert suite.view.epoch == 0
        b.fail_with = None

        placement = await a.until_epoch(2)
        assert placement == await b.until_epoch(2)


async def test_a_redis_that_lost_everything_gets_the_placement_back(suite):
    scheduler = await suite.scheduler()
    async with suite.expert("a") as a, suite.expert("b"):
        placement = await suite.until_epoch(1)
        await a.until_epoch(1)
        suite.redis.kill(lose_data=True)
        suite.redis.start()

        await scheduler.until("placement.republished")
        assert await suite.bus.get_bytes("placement:current") == b"1"
        async with suite.expert("c") as c:
            assert (await c.until_epoch(2)).epoch == 2
        assert placement.epoch == 1


async def test_a_new_scheduler_on_an_empty_redis_goes_on_from_what_workers_saw(suite):
    async with suite.expert("a", epoch=41) as a, suite.expert("b", epoch=40) as b:
        await suite.scheduler()

        assert (await suite.until_epoch(1)).epoch == 42
        await a.until_epoch(42)
        await b.until_epoch(42)


async def test_a_redis_that_went_back_in_time_is_overtaken(suite):
    scheduler = await suite.scheduler()
    async with suite.expert("a") as a, suite.expert("b") as b:
        await suite.until_epoch(1)
        await b.until_epoch(1)
        await a.until_epoch(1)
        await scheduler.kill()
        a.epoch = b.epoch = 7  # later epochs that Redis has forgotten

        await suite.scheduler()

        assert (await suite.until_epoch(2)).epoch == 8
        await a.until_epoch(8)


async def test_a_redis_that_went_back_in_time_is_overtaken_whoever_has_seen_more(suite):
    async with suite.expert("a") as a, suite.expert("b") as b:
        scheduler = await suite.scheduler()
        await a.until_epoch(1)
        await b.until_epoch(1)
        await scheduler.kill()
        async with suite.expert("bystander", digest="model-b", epoch=7):
            await suite.scheduler()

            assert (await a.until_epoch(2)).epoch == 8
            await b.until_epoch(8)


async def test_after_a_failure_all_workers_are_told_again_what_is_in_force(suite):
    scheduler = await suite.scheduler()
    async with suite.expert("a", slots=8) as a:
        await a.until_epoch(1)
        told = len(a.confirmed)
        async with suite.expert("b", slots=8) as b:
            b.fail_with = CheckpointError("model.safetensors", "is cut short")
            await scheduler.until("placement.failed")
        while (
            len(a.confirmed) == told
        ):  # nothing else is wanted; it may not have heard the end of that
            await asyncio.sleep(0.01)
        assert a.confirmed == [1] * len(a.confirmed)


async def test_a_worker_with_another_model_is_left_out_and_said(suite):
    scheduler = await suite.scheduler()
    async with suite.expert("a", slots=8), suite.expert("b", slots=2, digest="model-b"):
        placement = await suite.until_epoch(1)
        assert [worker.worker_id for worker in placement.workers] == ["a"]
        text = "expert worker b: has model model-b, others have model-a"
        async with scheduler.stub() as stub:
            while text not in (await stub.GetFleet(pb.GetFleetRequest())).waiting_for:
                pass


async def test_a_standby_takes_over_when_the_leader_stops(suite):
    leader = await suite.scheduler(worker_id="s-1")
    await leader.until("leader.changed", leads=True)
    standby = await suite.scheduler(worker_id="s-2")
    async with standby.stub() as stub:
        while (await stub.GetFleet(pb.GetFleetRequest())).waiting_for != [
            "the lead, which s-1 has"
        ]:
            pass
    leader.signal(signal.SIGTERM)
    assert await leader.process.wait() == 0

    async with suite.expert("a", slots=8):
        await standby.until("leader.changed", leads=True)
        await suite.until_epoch(1)


async def test_a_leader_that_slept_cannot_undo_what_its_successor_did(suite):
    paused = await suite.scheduler(worker_id="s-1")
    async with suite.expert("a", slots=8) as a:
        await suite.until_epoch(1)
        await a.until_epoch(1)
        paused.signal(signal.SIGSTOP)
        await suite.bus.delete("leader:scheduler")  # as its expiry does
        successor = await suite.scheduler(worker_id="s-2")
        await successor.until("leader.changed", leads=True)
        async with suite.expert("b", slots=8) as b:
            await b.until_epoch(2)
            paused.signal(signal.SIGCONT)
            await paused.until("leader.changed", leads=False)
        third = await a.until_epoch(3)

    assert [worker.worker_id for worker in third.workers] == ["a"]
    commits = [entry["epoch"] for entry in paused.log if entry["event"] == "placement.committed"]
    assert commits == [1]


async def test_a_scheduler_waits_for_redis_and_can_be_stopped_meanwhile(suite):
    suite.redis.kill()
    scheduler = await suite.scheduler()
    waiting = await scheduler.until("service.waiting")
    assert "--redis-url" in waiting["waiting_for"]

    scheduler.signal(signal.SIGTERM)

    assert await scheduler.process.wait() == 0
    suite.redis.start()


async def test_a_wrong_url_or_port_ends_the_start_with_one_line(suite):
    scheduler = await suite.scheduler("--redis-url", "http://user:canary@host")
    _, err = await scheduler.process.communicate()
    assert scheduler.process.returncode == 2
    assert err.decode().startswith("error: redis_url: --redis-url (MOESAIC_REDIS_URL) must begin")
    assert "canary" not in err.decode()
    assert err.count(b"\n") == 1

    async with suite.expert("a") as a:
        port = a.lease.record.admin_address.rsplit(":", 1)[1]
        scheduler = await suite.scheduler("--admin-port", port)
        _, err = await scheduler.process.communicate()
    assert scheduler.process.returncode == 3  # it may be free later
    assert b"--admin-port" in err
    assert err.count(b"\n") == 1
