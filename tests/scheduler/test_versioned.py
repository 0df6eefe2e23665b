"""Every order keeps one promise, over a real Redis: policies that operators set, and the action for a shape."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from moesaic.cluster.brownout_view import POLICY
from moesaic.cluster.leadership import Leadership
from moesaic.cluster.placement_view import PlacementView
from moesaic.cluster.redis.bus import Bus
from moesaic.errors import InvalidInput, NotReady
from moesaic.messages.brownout import BrownoutPolicy
from moesaic.messages.decisions import Pin, PlacementPolicy
from moesaic.messages.scaling import FleetShape, ScalingAction, ScalingPolicy
from moesaic.services.scheduler.epochs.store import EpochStore
from moesaic.services.scheduler.scaling.actions import ACTION
from moesaic.services.scheduler.versioned import PLACEMENT, SCALING, VersionedStore
from tests.redis_servers import RedisServer, RedisServers


def with_pin(policy: PlacementPolicy) -> PlacementPolicy:
    pin = Pin(layer=0, expert=len(policy.pins), worker_id="a")
    return replace(policy, pins=[*policy.pins, pin])


def with_worker(policy: ScalingPolicy) -> ScalingPolicy:
    return replace(policy, max_experts=policy.max_experts + 1)


def with_number(action: ScalingAction) -> ScalingAction:
    return replace(action, number=action.number + 1)


def with_second(policy: BrownoutPolicy) -> BrownoutPolicy:
    return replace(policy, window_s=policy.window_s + 1.0)


# The settings of two starts, and a change that adds one to what there is.
KINDS: dict[str, tuple[Any, Any, Callable[[Any], Any]]] = {
    PLACEMENT: (
        PlacementPolicy(policy="auto"),
        PlacementPolicy(policy="keep"),
        with_pin,
    ),
    SCALING: (ScalingPolicy(mode="advise"), ScalingPolicy(mode="auto"), with_worker),
    POLICY: (BrownoutPolicy(mode="paper"), BrownoutPolicy(mode="auto"), with_second),
    ACTION: (
        ScalingAction(number=0, shape=FleetShape(0, 0)),
        ScalingAction(number=0, shape=FleetShape(0, 0), decision_id="other"),
        with_number,
    ),
}


class Schedulers:
    """Schedulers on one Redis, each with its own setting."""

    def __init__(self, key: str, redis: RedisServer, bus: Bus) -> None:
        self.key, self.redis, self.bus = key, redis, bus
        self.setting, self.other_setting, self.more = KINDS[key]
        self.told: list[Any] = []
        self.leaderships: dict[str, Leadership] = {}
        self.now_s = 0.0

    def ordered(self, before: Any) -> Any:
        """What an order of one more makes of ``before``."""
        return replace(self.more(before), version=before.version + 1)

    async def start(
        self, worker_id: str = "s-0", generation: int = 1, *, setting: Any = None
    ) -> VersionedStore[Any]:
        """Start one, which leads if nobody else does or it is a later start of the leader."""
        leadership = Leadership(self.bus, "scheduler", worker_id, generation)
        await leadership.contend()
        self.leaderships[worker_id] = leadership
        epochs = EpochStore(self.bus, leadership, PlacementView())

        async def tell(policy: Any) -> None:
            self.told.append(policy)

        setting = setting or self.setting
        return VersionedStore(
            self.bus, epochs, leadership, self.key, setting, tell, lambda: self.now_s
        )


@pytest.fixture(params=KINDS)
async def schedulers(
    redis_servers: RedisServers, request: pytest.FixtureRequest
) -> AsyncIterator[Schedulers]:
    async with AsyncExitStack() as parts:
        redis = parts.enter_context(redis_servers.lent())
        bus = await parts.enter_async_context(Bus.connect(redis.url, "test"))
        yield Schedulers(request.param, redis, bus)


class TestOrders:
    async def test_changes_at_once_are_all_kept(self, schedulers: Schedulers) -> None:
        leader = await schedulers.start()

        await asyncio.gather(*(leader.change(schedulers.more) for _ in range(5)))

        expected = schedulers.setting
        for _ in range(5):
            expected = schedulers.ordered(expected)
        assert leader.current == expected
        again = await schedulers.start("s-1")
        await again.look()
        assert again.current == expected

    async def test_an_order_outlives_its_scheduler_and_wins_over_other_settings(
        self, schedulers: Schedulers
    ) -> None:
        before = await schedulers.start()
        ordered = await before.change(schedulers.more)

        kept, edited = [
            await schedulers.start(generation=number, setting=schedulers.other_setting)
            for number in (2, 3)
        ]
        await kept.keep()

        assert kept.current == ordered
        # Also where the next leader has not looked yet.
        assert await edited.change(schedulers.more) == schedulers.ordered(ordered)

    async def test_an_order_of_what_is_set_already_outlives_its_scheduler_too(
        self, schedulers: Schedulers
    ) -> None:
        before = await schedulers.start()
        await before.change(lambda policy: policy)

        successor = await schedulers.start(generation=2, setting=schedulers.other_setting)
        await successor.keep()

        assert successor.current == replace(schedulers.setting, version=1)

    async def test_the_setting_of_another_start_does_not_bind_a_leader(
        self, schedulers: Schedulers
    ) -> None:
        before = await schedulers.start()
        await before.keep()

        successor = await schedulers.start(generation=2, setting=schedulers.other_setting)
        await successor.keep()

        standby = await schedulers.start("s-1")
        await standby.look()
        assert successor.current == standby.current == schedulers.other_setting

    async def test_a_scheduler_that_waits_sees_the_policy_and_cannot_change_it(
        self, schedulers: Schedulers
    ) -> None:
        leader, standby = await schedulers.start(), await schedulers.start("s-1")
        ordered = await leader.change(schedulers.more)

        await standby.look()

        assert standby.current == ordered
        with pytest.raises(NotReady):
            await standby.change(schedulers.more)
        await standby.keep()
        await leader.look()
        assert leader.current == standby.current == ordered

    async def test_a_change_that_is_refused_changes_nothing(self, schedulers: Schedulers) -> None:
        leader = await schedulers.start()

        def refuse(policy: Any) -> Any:
            raise InvalidInput("mode", "must make sense")

        with pytest.raises(InvalidInput, match="must make sense"):
            await leader.change(refuse)

        assert leader.current == schedulers.setting
        assert await schedulers.bus.get_bytes(schedulers.key) is None

    @pytest.mark.parametrize("harm", ["lost", "forged"])
    async def test_a_leader_puts_back_what_redis_has_lost(
        self, schedulers: Schedulers, harm: str
    ) -> None:
        leader, standby = await schedulers.start(), await schedulers.start("s-1")
        ordered = await leader.change(schedulers.more)
        if harm == "lost":
            await schedulers.bus.connection.client.flushall()
        else:
            name = schedulers.bus.connection.key(schedulers.key)
            await schedulers.bus.connection.client.set(name, b"of nobody here")

        await leader.keep()

        assert leader.current == ordered
        await standby.look()
        assert standby.current == ordered

    async def test_no_setting_replaces_an_order_that_its_scheduler_still_holds(
        self, schedulers: Schedulers
    ) -> None:
        leader = await schedulers.start()
        ordered = await leader.change(schedulers.more)
        await schedulers.bus.connection.client.flushall()
        newcomer = await schedulers.start("s-1", setting=schedulers.other_setting)
        await newcomer.keep()
        stored = await schedulers.bus.get(schedulers.key, msgspec.msgpack.Decoder(type(ordered)))
        assert stored == schedulers.other_setting

        await leader.look()
        assert leader.current == ordered
        await schedulers.bus.delete("leader:scheduler")
        await schedulers.leaderships["s-0"].contend()
        await leader.keep()

        await newcomer.look()
        assert newcomer.current == leader.current == ordered

    async def test_a_leader_that_knows_no_order_gets_it_from_a_scheduler_that_waits(
        self, schedulers: Schedulers
    ) -> None:
        leader, standby = await schedulers.start(), await schedulers.start("s-1")
        ordered = await leader.change(schedulers.more)
        await standby.look()
        await schedulers.bus.connection.client.flushall()
        again = await schedulers.start(generation=2)
        await again.keep()
        assert again.current == schedulers.setting

        await standby.keep()

        await again.keep()
        assert again.current == standby.current == ordered

    async def test_an_order_that_redis_and_its_leader_lost_replaces_no_later_one(
        self, schedulers: Schedulers
    ) -> None:
        leader, standby = await schedulers.start(), await schedulers.start("s-1")
        schedulers.now_s = 100.0
        for _ in range(3):
            await leader.change(schedulers.more)
        await standby.look()
        await schedulers.bus.connection.client.flushall()
        again = await schedulers.start(generation=2)
        await again.keep()

        schedulers.now_s = 200.0
        later = await again.change(schedulers.more)
        await standby.look()
        await schedulers.bus.delete("leader:scheduler")
        await schedulers.leaderships["s-1"].contend()
        await standby.keep()

        await again.look()
        assert standby.current == again.current == later

    async def test_a_redis_that_went_back_gets_the_latest_order_again(
        self, schedulers: Schedulers
    ) -> None:
        leader, standby = await schedulers.start(), await schedulers.start("s-1")
        await leader.change(schedulers.more)
        name = schedulers.bus.connection.key(schedulers.key)
        earlier = await schedulers.bus.connection.client.get(name)
        ordered = await leader.change(schedulers.more)
        await schedulers.bus.connection.client.set(name, earlier)

        await leader.keep()

        assert leader.current == ordered
        await standby.look()
        assert standby.current == ordered

    async def test_a_scheduler_that_waits_holds_the_order_when_redis_loses_it(
        self, schedulers: Schedulers, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("moesaic.services.scheduler.versioned._LOOK_S", 0.01)
        leader, standby = await schedulers.start(), await schedulers.start("s-1")
        ordered = await leader.change(schedulers.more)
        running = asyncio.create_task(standby.run())
        while standby.current != ordered:
            await asyncio.sleep(0.01)
        running.cancel()
        await schedulers.bus.connection.client.flushall()

        await schedulers.leaderships["s-1"].contend()
        await standby.keep()

        newcomer = await schedulers.start("s-2")
        await newcomer.look()
        assert newcomer.current == ordered

    async def test_what_is_known_stays_while_redis_is_gone(self, schedulers: Schedulers) -> None:
        leader = await schedulers.start()
        ordered = await leader.change(schedulers.more)
        schedulers.redis.kill()

        await leader.look()
        schedulers.redis.start()

        assert leader.current == ordered

    async def test_readers_are_told_of_every_change_and_of_nothing_else(
        self, schedulers: Schedulers
    ) -> None:
        leader = await schedulers.start()
        await leader.keep()
        await leader.keep()
        ordered = await leader.change(schedulers.more)
        await leader.change(lambda policy: policy)
        await leader.keep()

        assert schedulers.told == [schedulers.setting, ordered]
