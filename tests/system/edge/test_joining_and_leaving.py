"""Agents join late, leave for good, or hang; the placement follows, and nothing is lost."""

import signal
import time

import pytest

from tests.suites import Suite
from tests.system.control import Watch, paused
from tests.system.edge.control import edge_control, lacking, with_sole_holder
from tests.system.edge.late_agents import late_agent
from tests.system.edge.users import SITES, RightAnswers, users_at
from tests.waiting import until

LATE, LATE_BYTES = "agent-9", 80_000_000
OFF = "agent-8"  # its clock
SOLE = 40  # experts: more than others can load at once beside those that they have


@pytest.mark.slow
async def test_an_agent_joins_late_and_leaves_for_good_and_its_sole_experts_stay(
    roomy: Suite, right_answers: RightAnswers
) -> None:
    async with edge_control(roomy) as seen:
        await seen.complete()
        async with users_at(roomy.url, right_answers, typed=()):
            with late_agent(roomy, LATE, LATE_BYTES) as agent:
                await agent.until_ready()
                await seen.count_in(LATE)
                joined = await seen.complete()
                assert LATE in [worker.worker_id for worker in joined.workers]
                async with users_at(roomy.url, right_answers, [LATE], typed=()):
                    pass

                await seen.apply(with_sole_holder(joined, LATE, SOLE))
                await seen.complete()
                watch = Watch(roomy, "scheduler")
                agent.process.send_signal(signal.SIGTERM)
                await until(lambda: agent.process.poll() is not None)
            assert agent.process.returncode == 0
            assert lacking(await seen.placement()) == []
            assert watch.entries("placement.staged")
            assert not watch.entries("placement.obsolete")
            seen.count_out(LATE)
            after = await seen.complete()
    assert [worker.worker_id for worker in after.workers] == list(SITES)


@pytest.mark.slow
@pytest.mark.parametrize("ahead_s", [-3600, 3600])
async def test_an_agent_whose_clock_is_an_hour_off_serves_and_is_served(
    roomy: Suite, right_answers: RightAnswers, ahead_s: float
) -> None:
    async with edge_control(roomy) as seen:
        await seen.complete()
        begun_s = int(time.time())
        with late_agent(roomy, OFF, LATE_BYTES, ahead_s=ahead_s) as agent:
            await agent.until_ready()
            await seen.count_in(OFF)
            joined = await seen.complete()
            assert OFF in [worker.worker_id for worker in joined.workers]
            # A start is numbered by the time of day.
            started_s = dict(await seen.members())[OFF] - ahead_s
            assert begun_s <= started_s <= time.time()

            held_elsewhere = with_sole_holder(joined, OFF, SOLE)
            await seen.apply(held_elsewhere)
            async with users_at(roomy.url, right_answers, [OFF, "agent-0"], typed=()):
                await seen.complete()
            await right_answers.check_all(roomy.url, [OFF, "agent-0"])
            seen.count_out(OFF)
        await seen.complete()


@pytest.mark.slow
async def test_others_take_the_sole_experts_of_an_agent_that_hangs_in_stages(
    roomy: Suite, right_answers: RightAnswers
) -> None:
    async with edge_control(roomy) as seen:
        before = await seen.complete()
        await seen.apply(with_sole_holder(before, "agent-2", SOLE))
        await seen.complete()
        watch = Watch(roomy, "scheduler")
        async with users_at(roomy.url, right_answers, SITES[:2]):
            with paused(roomy, "agent-2"):
                seen.workers.remove("agent-2")
                without = await seen.complete()
            seen.workers.append("agent-2")
            after = await seen.complete()
    assert [worker.worker_id for worker in without.workers] == list(SITES[:2])
    assert [worker.worker_id for worker in after.workers] == list(SITES)
    assert watch.entries("placement.staged")
    assert not watch.entries("placement.refused")
