"""The scheduler and Redis hang or die; agents serve on, and all is well again by itself."""

import asyncio
import signal

import pytest

from tests.suites import Suite
from tests.system.control import paused
from tests.system.edge.control import edge_control, restarts, swapped
from tests.system.edge.users import SITES, RightAnswers, users_at

LEASES_END_S = 7.0  # all leases of agents end within that time
MOVED = 2  # experts, which takes one stage


@pytest.mark.timeout(120)
async def test_agents_serve_on_without_scheduler_and_redis_and_are_not_restarted(
    tight: Suite, right_answers: RightAnswers
) -> None:
    agents = {name: tight.pid(name) for name in SITES}
    async with edge_control(tight) as seen:
        before = await seen.complete()
        async with users_at(tight.url, right_answers, typed=()) as load:
            with paused(tight, "scheduler"), paused(tight, "redis"):
                await asyncio.sleep(LEASES_END_S)
                await load.round()

            back = [restarts(tight, name) for name in ("scheduler", "redis")]
            tight.signal("scheduler", signal.SIGKILL)
            tight.signal("redis", signal.SIGKILL)
            await load.round()

            while not all(is_back() for is_back in back):
                await asyncio.sleep(0.1)
            await seen.until_led()
            after = await seen.complete()
            assert after.slots == before.slots

            await seen.apply(swapped(after, MOVED, 0, 2))
            assert (await seen.complete()).slots == swapped(after, MOVED, 0, 2).slots
    assert {name: tight.pid(name) for name in SITES} == agents
