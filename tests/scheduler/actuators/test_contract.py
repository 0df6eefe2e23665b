"""Every actuator keeps the promise of ``contract.py``, each with what it works with."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from moesaic.errors import MoesaicError
from moesaic.messages.scaling import FleetShape
from tests.redis_servers import RedisServers
from tests.scheduler.actuators.platforms import MOST, PLATFORMS, THERE, Platform


@pytest.fixture(params=PLATFORMS)
async def platform(
    request: pytest.FixtureRequest, redis_servers: RedisServers, tmp_path: Path
) -> AsyncIterator[Platform]:
    async with PLATFORMS[request.param](redis_servers, tmp_path) as platform:
        yield platform


class TestActuators:
    async def test_it_says_what_there_is_and_what_there_can_be(
        self, platform: Platform, request: pytest.FixtureRequest
    ) -> None:
        actuator = platform.actuator()

        assert actuator.name == request.node.callspec.params["platform"]
        assert (await actuator.intended(), await actuator.most()) == (THERE, MOST)
        assert platform.changes() == []

    async def test_it_leads_to_every_shape_it_is_asked_for(self, platform: Platform) -> None:
        actuator = platform.actuator()

        for shape in (MOST, FleetShape(1, 1), FleetShape(2, 3), FleetShape(1, 4), THERE):
            await actuator.apply(shape)

            assert await actuator.intended() == shape

    async def test_a_shape_that_is_there_changes_nothing(self, platform: Platform) -> None:
        for _ in range(2):
            await platform.actuator().apply(THERE)

        assert platform.changes() == []

    async def test_one_order_changes_no_more_than_it_must(self, platform: Platform) -> None:
        await platform.actuator().apply(FleetShape(1, 3))

        assert len(platform.changes()) == 1

    async def test_the_next_scheduler_begins_nothing_that_is_under_way(
        self, platform: Platform
    ) -> None:
        platform.busy = True
        await platform.actuator().apply(FleetShape(2, 1))
        begun = platform.changes()

        next_one = platform.actuator()
        await next_one.apply(FleetShape(2, 1))

        assert platform.changes() == begun
        assert len(begun) == 2
        assert await next_one.intended() == FleetShape(2, 1)

    async def test_two_schedulers_at_once_change_no_more_than_one(self, platform: Platform) -> None:
        both = platform.actuator(), platform.actuator()

        await asyncio.gather(*(actuator.apply(FleetShape(2, 1)) for actuator in both))

        assert len(platform.changes()) == 2
        assert await both[0].intended() == FleetShape(2, 1)

    async def test_a_place_that_takes_no_orders_is_an_error_and_later_none(
        self, platform: Platform
    ) -> None:
        actuator = platform.actuator()
        await platform.fail()
        with pytest.raises(MoesaicError):
            await actuator.apply(MOST)
        assert platform.changes() == []

        await platform.recover()
        await actuator.apply(MOST)

        assert await actuator.intended() == MOST
