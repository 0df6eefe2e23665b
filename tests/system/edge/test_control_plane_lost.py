"""The scheduler and Redis hang or die; agents serve on, and all is well again by itself."""

import asyncio
import signal

import pytest

from tests.suites import Suite
from tests.system.control import paused
from tests.system.edge.control import edge_control, restarts, swapped
from tests.system.edge.users import SITES, RightAnswers, users_at
from tests.waiting import until

LEASES_END_S = 7.0  # all leases of agents end within that time
MOVED = 2  # experts, which takes one stage


@pytest.mark.slow
async def test_agents_serve_on_without_scheduler_and_redis_and_are_not_restarted(
    tight: Suite, right_answers: RightAnswers
) -> None:
    agents = {name: tight.pid(name) for name in SITES}
    async with edge_control(tight) as seen:
        await seen.complete()
        async with users_at(tight.url, right_answers, typed=()) as load:
            with paused(tight, "scheduler"), paused(tight, "redis"):
                # Nothing shows that leases have ended while nobody can read them.
                await asyncio.sleep(LEASES_END_S)
                await load.round()

            back = [restarts(tight, name) for name in ("scheduler", "redis")]
            tight.signal("scheduler", signal.SIGKILL)
            tight.signal("redis", signal.SIGKILL)
            await load.round()

            await until(lambda: all(is_back() for is_back in back))
            await seen.until_led()
            # An agent whose lease comes late is taken for lost: experts may have moved, and others come back.
            after = await seen.complete()

            await seen.apply(swapped(after, MOVED, 0, 2))
            assert (await seen.complete()).slots == swapped(after, MOVED, 0, 2).slots
    assert {name: tight.pid(name) for name in SITES} == agents
