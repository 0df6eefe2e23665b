"""Agents are killed, also in every phase of a migration; no expert is lost and no answer is wrong."""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from moesaic.messages.placement import Placement
from tests.suites import Suite
from tests.system.control import CALLS_BREAK_S, Watch, paused
from tests.system.edge.control import edge_control, restarts, swapped
from tests.system.edge.users import SITES, RightAnswers, users_at
from tests.waiting import until

JITTER = 4  # slots: an agent measures at each start what else it needs
MOVED = 6  # experts: more than an agent of 40 MB can load at once beside those that it has


async def test_without_an_agent_others_and_files_serve_until_it_has_its_experts_again(
    tight: Suite, right_answers: RightAnswers
) -> None:
    async with edge_control(tight) as seen:
        before = await seen.complete()
        async with users_at(tight.url, right_answers) as load:
            back = restarts(tight, "agent-2")
            with paused(tight, "scheduler"):  # nobody places its experts elsewhere
                tight.signal("agent-2", signal.SIGKILL)
                await load.round()
            await until(back)
            after = await seen.complete()
            await load.round()
    assert after.epoch > before.epoch
    again, then = held_by(after, "agent-2"), held_by(before, "agent-2")
    assert len(again & then) >= len(then) - JITTER


def held_by(placement: Placement, agent: str) -> set[tuple[int, int]]:
    """Give the experts of one agent, each with its layer."""
    at = [worker.worker_id for worker in placement.workers].index(agent)
    held = zip(placement.layers, placement.slots, strict=True)
    return {(layer, expert) for layer, by_worker in held for expert in by_worker[at]}


Kill = Callable[[], None]
Watches = dict[str, Watch]  # by the name of the process
Phase = Callable[[Suite, Watches, Kill], Awaitable[bool]]
"""Kills in one phase of a migration; False if it was over too soon."""


async def preparing(suite: Suite, watches: Watches, kill: Kill) -> bool:
    """Kill while agents load."""
    await watches["scheduler"].until("placement.planned")
    kill()
    return not watches["scheduler"].entries("placement.committed")


async def prepared(suite: Suite, watches: Watches, kill: Kill) -> bool:
    """Kill when all agents have loaded, and before that is committed."""
    epoch = (await watches["scheduler"].until("placement.planned"))["epoch"]
    await watches["agent-1"].until("placement.prepared", epoch=epoch)  # it had nothing to load
    with paused(suite, "scheduler"), suppress(TimeoutError):
        async with asyncio.timeout(CALLS_BREAK_S):
            for agent in SITES:
                await watches[agent].until("placement.prepared", epoch=epoch)
            if not watches["scheduler"].entries("placement.committed"):
                kill()
                return True
    return False


async def committed(suite: Suite, watches: Watches, kill: Kill) -> bool:
    """Kill right after the commit."""
    await watches["scheduler"].until("placement.committed")
    kill()
    return True


async def between_stages(suite: Suite, watches: Watches, kill: Kill) -> bool:
    """Kill when the first stage is in force and the next one has not begun."""
    await watches["scheduler"].until("placement.staged")
    epoch = (await watches["scheduler"].until("placement.committed"))["epoch"]
    kill()
    return bool(watches["scheduler"].entries("placement.planned")[-1]["epoch"] == epoch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "agent"),
    [
        pytest.param(preparing, "agent-0", id="a-target-while-it-loads"),
        pytest.param(preparing, "agent-2", id="a-source-while-others-load"),
        pytest.param(prepared, "agent-2", id="between-prepare-and-commit"),
        pytest.param(committed, "agent-1", id="right-after-the-commit"),
        pytest.param(between_stages, "agent-0", id="between-stages"),
    ],
)
async def test_an_agent_killed_in_a_migration_costs_no_expert_and_no_answer(
    tight: Suite, right_answers: RightAnswers, phase: Phase, agent: str
) -> None:
    async with edge_control(tight) as seen:
        before = await seen.complete()
        await seen.until_led()
        async with users_at(tight.url, right_answers):
            back = restarts(tight, agent)
            met = False
            while not met:
                placed = await seen.complete()
                watches = {name: Watch(tight, name) for name in ("scheduler", *SITES)}
                applying = asyncio.create_task(seen.apply(swapped(placed, MOVED, 0, 2)))
                met = await phase(tight, watches, lambda: tight.signal(agent, signal.SIGKILL))
                await asyncio.gather(applying, return_exceptions=True)
            await until(back)
            after = await seen.complete()
    assert after.epoch > before.epoch
    epochs = [entry["epoch"] for entry in watches["scheduler"].entries("placement.planned")]
    assert epochs == sorted(set(epochs))
