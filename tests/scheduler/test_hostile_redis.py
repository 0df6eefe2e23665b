"""A scheduler's process, a gateway's and an attention worker's followers, with hostile values in every key.

No cheaper test has all readers at work, with what they compute from what they read.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from structlog.testing import capture_logs

from moesaic.cluster.brownout_view import POLICY, watch_brownout
from moesaic.cluster.leadership import leadership
from moesaic.cluster.placement_view import PlacementView, watch_placement
from moesaic.cluster.redis.bus import Bus
from moesaic.cluster.redis.connection import RedisConnection
from moesaic.cluster.registry import Fleet, next_generation, watch_fleet
from moesaic.cluster.same_weights import same_weights
from moesaic.messages.brownout import BrownoutPolicy
from moesaic.messages.decisions import PlacementPolicy
from moesaic.messages.registry import Weights
from moesaic.messages.scaling import FleetShape, ScalingPolicy
from moesaic.services.gateway.readiness import lacking_experts
from moesaic.services.scheduler.epochs.store import EpochStore
from moesaic.services.scheduler.fleet import FleetProposer
from moesaic.services.scheduler.log import DecisionLog
from moesaic.services.scheduler.main import follow_brownout
from moesaic.services.scheduler.planning.site_profiles import SiteProfiles
from moesaic.services.scheduler.planning.traffic import TrafficFeed
from moesaic.services.scheduler.scaling.actions import ActionStore
from moesaic.services.scheduler.scaling.feed import LoadFeed
from moesaic.services.scheduler.versioned import PLACEMENT, SCALING, VersionedStore
from tests.redis_keys import DEAD_LETTERS, key_of, placement
from tests.redis_vandals import VANDALS, Vandal
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("patient_with_redis")


@asynccontextmanager
async def readers(bus: Bus) -> AsyncIterator[PlacementView]:
    """Everything that gateways and attention workers read."""
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(watch_fleet(bus))
        view = await stack.enter_async_context(watch_placement(bus))
        await stack.enter_async_context(same_weights(bus, Weights(digest="d"), []))

        async def policies() -> None:
            async for policy in watch_brownout(bus):
                assert policy.substitution

        async def look() -> None:
            while True:
                lacking_experts(view.current, fleet.workers)
                await asyncio.sleep(0.01)

        async with asyncio.TaskGroup() as tasks:
            following = [tasks.create_task(policies()), tasks.create_task(look())]
            yield view
            for task in following:
                task.cancel()


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of all keys that readers of this process ask for."""
    asked: set[str] = set()
    of_name = RedisConnection.key

    def key(self: RedisConnection, name: str) -> str:
        asked.add(name)
        return of_name(self, name)

    monkeypatch.setattr(RedisConnection, "key", key)
    return asked


@pytest.mark.parametrize("vandal", VANDALS)
async def test_no_value_in_redis_ends_a_service_or_keeps_experts_from_being_placed(
    suite: Any, names: set[str], vandal: Vandal
) -> None:
    scheduler = await suite.scheduler("--prepare-timeout-s", "5")
    # It says a lot, and would wait for a reader.
    reading = asyncio.create_task(scheduler.until("no such event"))
    async with suite.expert("a", slots=8) as a, readers(suite.bus) as view:
        first = await a.until_epoch(1)
        number = 0
        while await vandal(suite.bus, number):
            number += 1
            await asyncio.sleep(0)
        async with suite.expert("b", slots=8) as b:
            # Both are placed, whatever is left in Redis.
            second = await b.until_epoch(first.epoch + 1)
            while {worker.worker_id for worker in second.workers} != {"a", "b"}:
                second = await b.until_epoch(second.epoch + 1)
            while view.epoch < second.epoch:
                await view.changed()
        assert scheduler.process.returncode is None
        assert not reading.done()
    reading.cancel()

    unknown = {n for n in names if n and not n.startswith(DEAD_LETTERS) and not key_of(n)}
    assert not unknown  # each new key belongs into the table


@pytest.mark.parametrize("vandal", VANDALS)
async def test_every_look_goes_on_and_puts_right_what_is_its_own(
    control: Any, monkeypatch: pytest.MonkeyPatch, vandal: Vandal
) -> None:
    monkeypatch.setattr("moesaic.cluster.redis.streams.BLOCK_S", 0.05)
    bus, view, fleet = control.bus, PlacementView(), Fleet()
    async with leadership(bus, "scheduler", "s", 1) as lead:
        store, log = EpochStore(bus, lead, view), DecisionLog(bus)
        actions = ActionStore(bus, store, lead)
        policies: list[VersionedStore[Any]] = [
            VersionedStore(bus, store, lead, PLACEMENT, PlacementPolicy(policy="eplb")),
            VersionedStore(bus, store, lead, SCALING, ScalingPolicy()),
            VersionedStore(bus, store, lead, POLICY, BrownoutPolicy()),
        ]
        traffic, load, sites = (
            TrafficFeed(bus, lead, view, 60.0),
            LoadFeed(bus, lead),
            SiteProfiles(bus, lead),
        )
        following = [
            asyncio.create_task(work)
            for work in (
                traffic.run(),
                load.run(),
                sites.run(),
                follow_brownout(bus, lead, log),
            )
        ]
        before = await store.allocate()
        await store.commit(placement(before))
        await actions.want(FleetShape(1, 1), FleetShape(1, 2), "d")
        with capture_logs() as logs:
            number = 0
            while await vandal(bus, number):
                number += 1
                await lead.contend()
                assert lead.held
                for policy in policies:
                    await policy.keep()
                await actions.keep()
                await fleet.refresh(bus)
                assert not fleet.stale
                await store.agree()
                assert view.current is not None
                newcomer = PlacementView()  # of a process that starts now
                await newcomer.refresh(bus)
                assert newcomer.current == view.current
                before, last = await store.allocate(), before
                assert last < before < last + (1 << 33)
                await log.refresh()
                assert log.recent_scaling(9) is not None
                assert 0 < await next_generation(bus, "x") <= 1 << 53
                proposer = FleetProposer(fleet)
                proposer.look()
                proposer.propose(view.current)
        assert actions.action is not None
        load.is_caught_up = False
        await until(lambda: load.is_caught_up)  # all entries were read
        assert not any(task.done() for task in following)
        assert sites.slowdown >= 0
        for task in following:
            task.cancel()
        await asyncio.gather(*following, return_exceptions=True)
    assert bus.last_lost == float("-inf")  # nothing of it is an outage
    failed = [entry for entry in logs if entry["event"] in ("entry.failed", "task.failed")]
    assert not failed
