"""Placements while expert workers join, drain, are lost or come back often, and while a leader sleeps."""

import asyncio
import signal

import pytest

from moesaic.v1 import scheduler_pb2 as pb


async def test_a_placement_for_a_newcomer_is_given_up_when_another_worker_drains(suite):
    scheduler = await suite.scheduler()
    async with suite.expert("a", slots=8) as a, suite.expert("b", slots=8) as b:
        first = await b.until_epoch(1)
        await a.until_epoch(1)
        async with suite.expert("c", slots=8) as c:
            c.may_prepare.clear()
            await c.asked_to_prepare.wait()
            c.asked_to_prepare.clear()
            await b.lease.update(state="draining")
            await scheduler.until("placement.obsolete", cause="b drains while experts are loaded")
            await c.asked_to_prepare.wait()
            c.may_prepare.set()

            placement = await c.until_epoch(first.epoch + 2)
    assert [worker.worker_id for worker in placement.workers] == ["a", "c"]
    assert first.epoch + 1 in a.aborted


@pytest.mark.parametrize(("role", "share"), [("expert", 1.0), ("edge-agent", 0.1)])
async def test_a_newcomer_serves_nothing_and_loads_without_rest(suite, role, share):
    await suite.scheduler()
    async with suite.expert("a", slots=8, role=role) as a:
        await a.until_epoch(1)
        async with suite.expert("b", slots=8, role=role) as b:
            await b.until_epoch(2)
            shares = dict(a.load_shares), dict(b.load_shares)  # before b leaves, and a loads again
    # Nobody served before the first; at the edge, links serve others.
    assert shares == ({1: 1.0, 2: 0.1}, {2: share})


async def test_a_worker_lost_while_others_load_is_not_waited_for(suite):
    await suite.scheduler()
    async with suite.expert("a", slots=8) as a:
        first = await a.until_epoch(1)
        async with suite.expert("b", slots=8) as b:
            b.may_prepare.clear()
            await b.asked_to_prepare.wait()
        async with suite.expert("c", slots=8) as c:
            placement = await c.until_epoch(first.epoch + 2)

    assert "b" not in [worker.worker_id for worker in placement.workers]


async def test_a_leader_that_slept_while_workers_loaded_cannot_commit(suite):
    paused = await suite.scheduler(worker_id="s-1")
    async with suite.expert("a", slots=8) as a:
        await a.until_epoch(1)
        async with suite.expert("b", slots=8) as b:
            b.may_prepare.clear()
            await b.asked_to_prepare.wait()  # of epoch 2
            paused.signal(signal.SIGSTOP)
            await suite.bus.delete("leader:scheduler")  # as its expiry does
            successor = await suite.scheduler(worker_id="s-2")
            await successor.until("leader.changed", leads=True)
            b.may_prepare.set()
            third = await b.until_epoch(3)
            paused.signal(signal.SIGCONT)
            await paused.until("leader.changed", leads=False)

            assert third.epoch == 3
            assert suite.view.epoch == 3
            commits = [e["epoch"] for e in paused.log if e["event"] == "placement.committed"]
            assert commits == [1]
            assert await a.until_epoch(3) == third


async def test_a_worker_that_comes_and_goes_is_left_alone_for_longer_and_longer(suite):
    scheduler = await suite.scheduler()
    async with suite.expert("a", slots=8) as a:
        await a.until_epoch(1)
        epochs = []
        for _ in range(2):
            async with suite.expert("b", slots=8) as b:
                epochs.append((await b.until_epoch(suite.view.epoch + 1)).epoch)
            await a.until_epoch(epochs[-1] + 1)
        async with suite.expert("b", slots=8), scheduler.stub() as stub:
            while True:
                waits = (await stub.GetFleet(pb.GetFleetRequest())).waiting_for
                if any("b: came back often" in text for text in waits):
                    break
                await asyncio.sleep(0.05)
            assert suite.view.epoch == epochs[-1] + 1
    assert [len(epochs), epochs[1] - epochs[0]] == [2, 2]


@pytest.mark.timeout(50)  # it would be left alone for a minute
async def test_a_worker_that_comes_and_goes_is_taken_at_once_if_it_is_needed(suite):
    await suite.scheduler()
    async with suite.expert("a") as a:
        for _ in range(8):
            async with suite.expert("b") as b:
                placed = await b.until_epoch(suite.view.epoch + 1)
                await a.until_epoch(placed.epoch)
