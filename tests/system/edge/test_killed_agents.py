"""Agents are killed, also in every phase of a migration; no expert is lost and no answer is wrong."""

import asyncio
import signal
from collections.abc import Awaitable, Callable

import pytest

from moesaic.messages.placement import Placement
from tests.suites import Suite
from tests.system.asking import until
from tests.system.control import paused
from tests.system.edge.control import Watch, edge_control, restarts, swapped
from tests.system.edge.users import SITES, RightAnswers, users_at

MOVED = 6  # experts: more than an agent of 40 MB can load at once beside those that it has


@pytest.mark.timeout(240)
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
    assert held_by(after, "agent-2") == held_by(before, "agent-2")


def held_by(placement: Placement, agent: str) -> list[list[int]]:
    """Give the experts of one agent, by layer."""
    at = [worker.worker_id for worker in placement.workers].index(agent)
    return [layer[at] for layer in placement.slots]


Kill = Callable[[], None]
Watches = dict[str, Watch]  # by the name of the process
Phase = Callable[[Suite, Watches, Kill], Awaitable[None]]


async def preparing(suite: Suite, watches: Watches, kill: Kill) -> None:
    """Kill while agents load."""
    await watches["scheduler"].until("placement.planned")
    kill()
    assert not watches["scheduler"].entries("placement.committed")


async def prepared(suite: Suite, watches: Watches, kill: Kill) -> None:
    """Kill when all agents have loaded, and before that is committed."""
    epoch = (await watches["scheduler"].until("placement.planned"))["epoch"]
    await watches["agent-1"].until("placement.prepared", epoch=epoch)  # it had nothing to load
    with paused(suite, "scheduler"):
        for agent in SITES:
            await watches[agent].until("placement.prepared", epoch=epoch)
        kill()
    assert not watches["scheduler"].entries("placement.committed", epoch=epoch)


async def committed(suite: Suite, watches: Watches, kill: Kill) -> None:
    """Kill right after the commit."""
    await watches["scheduler"].until("placement.committed")
    kill()


async def between_stages(suite: Suite, watches: Watches, kill: Kill) -> None:
    """Kill when the first stage is in force and the next one has not begun."""
    await watches["scheduler"].until("placement.staged")
    epoch = (await watches["scheduler"].until("placement.committed"))["epoch"]
    kill()
    assert watches["scheduler"].entries("placement.planned")[-1]["epoch"] == epoch


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("phase", "agent"),
    [
        pytest.param(preparing, "agent-0", id="a-target-while-it-loads", marks=pytest.mark.slow),
        pytest.param(preparing, "agent-2", id="a-source-while-others-load", marks=pytest.mark.slow),
        pytest.param(prepared, "agent-2", id="between-prepare-and-commit"),
        pytest.param(committed, "agent-1", id="right-after-the-commit", marks=pytest.mark.slow),
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
            watches = {name: Watch(tight, name) for name in ("scheduler", *SITES)}
            back = restarts(tight, agent)
            applying = asyncio.create_task(seen.apply(swapped(before, MOVED, 0, 2)))

            await phase(tight, watches, lambda: tight.signal(agent, signal.SIGKILL))

            await asyncio.gather(applying, return_exceptions=True)
            await until(back)
            after = await seen.complete()
    assert after.epoch > before.epoch
    epochs = [entry["epoch"] for entry in watches["scheduler"].entries("placement.planned")]
    assert epochs == sorted(set(epochs))
