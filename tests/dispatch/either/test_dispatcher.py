"""Both ways give local sums; each is gone, and a lost expert worker leaves the other."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch
from prometheus_client import REGISTRY

from moesaic.dispatch.either.dispatcher import ChoosingDispatcher
from moesaic.errors import ExpertUnavailable
from tests.dispatch import dispatcher_contract as contract

HALVES = [[0, 1, 2, 3], [4, 5, 6, 7]]
NUM_LAYERS = 3
WHY = ("exploring", "faster")


def steps_by(way: str) -> float:
    samples = [{"way": way, "why": why} for why in WHY]
    found = [REGISTRY.get_sample_value("moesaic_dispatch_ways_total", each) for each in samples]
    return sum(value or 0 for value in found)


class TestChoosing(
    contract.DispatcherContract, contract.OwnStepsContract, contract.BatchesAtOnceContract
):
    @pytest.fixture
    async def opened(self, cluster: Any, tiny_model: Any) -> AsyncIterator[contract.Opened]:
        async with cluster(tiny_model, 2) as c:
            c.put_in_force(c.placement(1, *HALVES))
            await c.routed.reachable()
            yield contract.Opened(
                ChoosingDispatcher(c.routed, c.local, NUM_LAYERS), c.local, c.config
            )


async def test_both_ways_are_gone_and_counted(cluster: Any, tiny_model: Any) -> None:
    async with cluster(tiny_model, 2) as c:
        dispatcher = ChoosingDispatcher(c.routed, c.local, NUM_LAYERS)
        c.put_in_force(c.placement(1, *HALVES))
        await c.routed.reachable()
        before = {way: steps_by(way) for way in ("route", "gather")}

        for rows in (1, 5, 70, 1, 5):
            await contract.Opened(dispatcher, c.local, c.config).step(rows)

        assert all(steps_by(way) > count for way, count in before.items())
        assert sum(steps_by(way) - count for way, count in before.items()) == 5


async def test_a_lost_expert_worker_leaves_the_other_way(cluster: Any, tiny_model: Any) -> None:
    async with cluster(tiny_model, 2) as c:
        dispatcher = ChoosingDispatcher(c.routed, c.local, NUM_LAYERS)
        c.put_in_force(c.placement(1, *HALVES))
        await c.routed.reachable()
        step = dispatcher.begin_step()
        await c.networks[1].close()

        with pytest.raises(ExpertUnavailable):  # the way was chosen when it was whole
            await dispatcher.dispatch(step, 0, torch.randn(2, 32))
        dispatcher.end_step(step)

        assert dispatcher.waiting_for == []
        await contract.Opened(dispatcher, c.local, c.config).step(3)
