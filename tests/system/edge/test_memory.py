"""Agents stay within their memory, whatever is asked of them, and give some of it back when they are told to."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from tests.suites import Suite
from tests.system.control import Watch
from tests.system.edge.control import EdgeControl, edge_control
from tests.system.edge.late_agents import late_agent, memory_group, num_killed, own_bytes
from tests.system.edge.users import SITES, RightAnswers, users_at
from tests.waiting import until

FULL, LOWERED = 80_000_000, 55_000_000
LATE, LATE_BYTES = "agent-9", 60_000_000
MARGIN_BYTES = 24_000_000  # of a control group: what the kernel keeps for a process, and files that it alone maps


@asynccontextmanager
async def within_memory(seen: EdgeControl, agents: Sequence[str]) -> AsyncIterator[list[int]]:
    """Watch the memory of agents for the length of the block; gives the most that each has used."""
    most = [0] * len(agents)

    async def watch() -> None:
        while True:
            for at, agent in enumerate(agents):
                told = await seen.profile(agent)
                most[at] = max(most[at], told.memory_used_bytes)
                assert told.memory_used_bytes <= told.memory_limit_bytes, agent
            await asyncio.sleep(0.1)

    watching = asyncio.create_task(watch())
    try:
        yield most
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        if not watching.cancelled():
            watching.result()


async def test_no_agent_takes_more_than_its_memory_while_experts_follow_the_traffic(
    roomy: Suite, right_answers: RightAnswers
) -> None:
    async with edge_control(roomy) as seen:
        before = await seen.complete()
        watch = Watch(roomy, "scheduler")
        async with users_at(roomy.url, right_answers, typed=()), within_memory(seen, SITES) as most:
            await seen.follow_policy("auto")
            try:
                await watch.until("placement.committed")
            finally:
                await seen.follow_policy("keep")
            after = await seen.complete()
            await seen.until_led()
        assert after.slots != before.slots
        assert min(most) > 0.5 * FULL  # it is not that they did not use it


@pytest.mark.slow
async def test_a_lowered_limit_moves_experts_away_and_a_raised_one_brings_them_back(
    roomy: Suite, right_answers: RightAnswers
) -> None:
    async with edge_control(roomy) as seen:
        await seen.complete()
        before = await seen.profile("agent-1")
        async with users_at(roomy.url, right_answers, typed=()):
            num_slots = await seen.limit("agent-1", LOWERED)
            assert num_slots < before.num_held

            async def is_within() -> bool:
                now = await seen.profile("agent-1")
                return now.num_held <= num_slots and now.memory_used_bytes <= LOWERED

            async def has_told() -> bool:
                told = await seen.most_expert_bytes("agent-1")
                return told <= num_slots * before.expert_bytes * 1.1

            async def holds_more() -> bool:
                return (await seen.profile("agent-1")).num_held > num_slots

            await until(is_within)
            async with within_memory(seen, ["agent-1"]):
                await seen.complete()
                await until(has_told)

                assert await seen.limit("agent-1", FULL) >= before.num_held - 2
                await seen.follow_policy("auto")
                try:
                    await until(holds_more)
                finally:
                    await seen.follow_policy("keep")
                await seen.complete()
    await right_answers.check_all(roomy.url, ["agent-1"])


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [10, 600])
async def test_an_agent_lives_in_a_control_group_of_little_more_than_its_memory(
    roomy: Suite, right_answers: RightAnswers, rounds: int
) -> None:
    async with edge_control(roomy) as seen:
        await seen.complete()
        told = await seen.profile("agent-0")
        before_bytes = own_bytes(roomy.pid("agent-0")) - told.memory_used_bytes
        limit_bytes = before_bytes + LATE_BYTES + MARGIN_BYTES
        with (
            memory_group(f"moesaic-{roomy.pid('agent-0')}", limit_bytes) as group,
            late_agent(roomy, LATE, LATE_BYTES, group) as agent,
        ):
            await agent.until_ready()
            await seen.count_in(LATE)
            await seen.complete()
            async with users_at(roomy.url, right_answers, [LATE, "agent-0"], typed=()) as load:
                for _ in range(rounds):
                    await load.round()
            assert agent.process.poll() is None
            assert num_killed(group) == 0
            seen.count_out(LATE)
        await until(lambda: agent.process.poll() is not None)
        await seen.complete()
