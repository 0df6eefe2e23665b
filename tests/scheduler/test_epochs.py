"""Epochs on a real Redis: whoever lost the lead, if only for a moment, commits nothing."""

from typing import Any

import pytest

from moesaic.cluster.leadership import Leadership
from moesaic.cluster.placement_view import PlacementView
from moesaic.errors import NotReady
from moesaic.messages.placement import Placement
from moesaic.messages.registry import WorkerRecord
from moesaic.services.scheduler.epochs.store import EpochStore


def placement(epoch: int) -> Placement:
    return Placement(epoch=epoch, model_digest="m", num_experts=1, workers=[], layers=[], slots=[])


@pytest.fixture
async def stores(control: Any) -> list[tuple[Leadership, EpochStore]]:
    """Of two schedulers; the first leads."""
    made = []
    for name in ("s-1", "s-2"):
        leadership = Leadership(control.bus, "scheduler", name, 1)
        made.append((leadership, EpochStore(control.bus, leadership, PlacementView())))
    await made[0][0].contend()
    return made


async def test_a_lead_that_was_won_back_does_not_commit_what_another_has_overtaken(stores, control):
    (first, mine), (second, others) = stores
    epoch = await mine.allocate()
    await control.bus.delete("leader:scheduler")  # as its expiry does
    await second.contend()
    assert await others.allocate() == epoch + 1  # workers forget what they prepared for ``epoch``
    await second.resign()

    with pytest.raises(NotReady, match="given out last is 2, no longer 1"):
        await mine.commit(placement(epoch))

    assert await control.bus.get_bytes("placement:current") is None
    await first.contend()
    await mine.commit(placement(await mine.allocate()))
    assert await control.bus.get_bytes("placement:current") == b"3"


async def test_a_redis_that_lost_its_data_meanwhile_gets_no_placement_by_a_commit(stores, control):
    (_, mine), _ = stores
    epoch = await mine.allocate()
    control.redis.kill(lose_data=True)
    await control.restart_redis()

    with pytest.raises(NotReady, match="given out last is 0, no longer 1"):
        await mine.commit(placement(epoch))

    assert await mine.allocate() == epoch + 1  # none is given out twice


async def test_who_does_not_say_what_it_has_seen_is_asked_again(stores, control):
    (_, mine), _ = stores
    silent = WorkerRecord(
        worker_id="attention-0",
        generation=1,
        role="attention",
        state="ready",
        admin_address="127.0.0.1:1",
    )
    async with control.expert("a", epoch=6) as a:
        records = [a.lease.record, silent]

        assert await mine.learn_from(records) == [silent]
        assert await mine.learn_from(records[:1]) == []
    assert await mine.allocate() == 7
