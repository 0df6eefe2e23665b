"""Experts move; workers, schedulers and Redis die or hang meanwhile; every answer is still the one that a
single process gives. What takes longer is in ``test_replacement_long.py``."""

import asyncio
import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from moesaic.cluster.placement_view import committed_epoch
from moesaic.v1 import expert_pb2, expert_pb2_grpc
from tests.suites import Suite, running
from tests.system.asking import Outcome, ask, question, stream, under_load
from tests.system.control import (
    SETTINGS,
    Control,
    Move,
    another_scheduler,
    cli,
    control,
    events,
    paused,
    planned,
    rotated,
)
from tests.waiting import HANG_S, until

LONG = 160  # tokens: more than come before a fault
LEASES_END_S = 7.0  # all leases of workers end within that time


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suite]:
    """Three expert workers with 14 slots for 32 experts: some have replicas, most have none."""
    flags = ("--experts", "3", "--slots-per-layer", "14")
    with running(tmp_path_factory.mktemp("tight"), *flags, settings=SETTINGS) as suite:
        yield suite


async def test_experts_move_under_load_and_no_answer_changes(
    tight: Suite, right: list[str], tmp_path: Path
) -> None:
    plan_file = tmp_path / "plan.json"

    async def counted_all() -> bool:
        return "null" not in json.dumps(await cli(tight, "experts", "ls"))

    async with under_load(tight.url, right):
        await until(counted_all)
        plan = await planned(tight, plan_file)
        assert plan["sampled_batches"] > 0
        assert 0 < plan["activated_after"] <= 14
        changes = await cli(tight, "placement", "diff", str(plan_file))
        assert sum(len(change["loads"]) for change in changes) == len(plan["moves"])

        applied = await cli(tight, "placement", "apply", str(plan_file))
        assert applied["epoch"] > plan["base_epoch"]

    stale = await asyncio.to_thread(tight.cli, "placement", "apply", str(plan_file))
    assert stale.returncode == 1
    assert "plan again" in stale.stderr
    prepared = [
        entry
        for number in range(3)
        for entry in events(tight, f"expert-{number}", "placement.prepared")
        if entry["epoch"] == applied["epoch"]
    ]
    assert sum(entry["loaded"] for entry in prepared) == len(plan["moves"])
    assert sum(entry["pulled"] for entry in prepared) == len(plan["moves"])  # peers had them all
    status = await cli(tight, "status")
    assert status["placement"]["decided_by"]["policy"] == "auto"
    assert status["placement"]["decided_by"]["last_decision"]["epoch"] == applied["epoch"]
    shown = await cli(tight, "placement", "show")
    placed = {w["id"]: w["experts"] for w in shown["placement"]["workers"]}
    wanted = plan["placement"]
    for idx, worker in enumerate(wanted["workers"]):
        slots = [layer["workers"][idx]["expert_ids"] for layer in wanted["layers"]]
        assert placed[worker["worker_id"]] == [sorted(e for e in s if e >= 0) for s in slots]
    assert sum([await counted(tight, f"expert-{number}") for number in range(3)]) > 0
    assert shown["decisions"][0]["cause"] == "operator"
    assert shown["decisions"][0]["epoch"] == applied["epoch"]


@pytest.mark.slow
async def test_a_worker_whose_experts_have_replicas_dies_and_nobody_who_asks_notices(
    spare: Suite, right: list[str]
) -> None:
    async with under_load(spare.url, right) as load:
        with paused(spare, "scheduler"):  # nobody has to act for that
            spare.signal("expert-2", signal.SIGKILL)
            await load.round()


async def dies_before_telling(seen: Control, worker: str) -> Move | None:
    """Have the scheduler die when it has committed a placement and told all workers but this one.

    None if it could not commit: so slow was the loading that its connections ended while it slept.
    """
    others = [name for name in seen.workers if name != worker]
    async with seen.moving(2, loaded=True) as move:
        with paused(seen.suite, worker):
            seen.suite.signal("scheduler", signal.SIGCONT)

            async def told() -> bool:
                epochs = [(await seen.slots(name)).epoch for name in others]
                return move.applying.done() or min(epochs) >= move.epoch

            await until(told)
            if move.applying.done():
                return None
            seen.suite.signal("scheduler", signal.SIGKILL)
    return move


async def test_schedulers_that_die_in_any_phase_leave_one_epoch_and_nothing_else(
    tight: Suite, right: list[str]
) -> None:
    async with control(tight) as seen, under_load(tight.url, right):
        await seen.settled()

        while (move := await dies_before_telling(seen, "expert-2")) is None:
            await seen.settled()
        assert await committed_epoch(seen.bus) == move.epoch  # Redis knows, and one worker does not
        assert (await seen.slots("expert-2")).epoch == move.before.epoch
        assert await seen.agreed() == move.epoch

        assert not await seen.is_alone(move.after)  # old experts are still held
        async with seen.moving(2) as move:  # while they are, and workers load others
            tight.signal("scheduler", signal.SIGKILL)
        assert await seen.settled() == move.before.epoch

        async with seen.moving(2, loaded=True) as move:  # and Redis does not know yet
            tight.signal("scheduler", signal.SIGKILL)
        assert await seen.settled() == move.before.epoch
    given_out = [entry["epoch"] for entry in events(tight, "scheduler", "placement.planned")]
    assert given_out == sorted(set(given_out))  # none twice, none lower than one before


@pytest.mark.slow
async def test_a_scheduler_that_slept_past_its_lease_commits_nothing(
    tight: Suite, right: list[str]
) -> None:
    def commits() -> list[int]:
        return [entry["epoch"] for entry in events(tight, "scheduler", "placement.committed")]

    async with (
        control(tight) as seen,
        under_load(tight.url, right),
        another_scheduler(tight, "standby") as standby,
    ):
        await seen.settled()
        address = (await standby.until("service.ready"))["admin_address"]
        async with seen.moving(2, loaded=True) as move:  # the answers wait for it
            before = commits()
            await seen.bus.delete("leader:scheduler")  # as its expiry does
            await standby.until("leader.changed", leads=True)
            # What it had prepared is given up.
            assert await seen.settled() == move.before.epoch
            epoch = await seen.apply(rotated(await seen.placement(), 1), address)
        with pytest.raises(grpc.aio.AioRpcError):
            await move.applying
        await seen.until_follows("standby")
        assert commits() == before
        assert await seen.agreed() == epoch > move.epoch
    async with control(tight) as seen:
        await seen.until_led()


@pytest.mark.slow
async def test_what_clients_see_of_the_loss_of_a_sole_holder(
    tight: Suite, local: Suite, right: list[str]
) -> None:
    numbers = range(4)
    bodies = [question(n, LONG, temperature=0.8 if n % 2 else 0) for n in numbers]
    async with httpx.AsyncClient(base_url=local.url, timeout=HANG_S) as client:
        answers = await asyncio.gather(*(ask(client, body) for body in bodies))
    whole = [answer.text for answer in answers]

    async with (
        httpx.AsyncClient(base_url=tight.url, timeout=HANG_S) as client,
        control(tight) as seen,
        asyncio.TaskGroup() as asked,
    ):

        async def begun(timeout_ms: int | None) -> list[asyncio.Task[Outcome]]:
            marks = [asyncio.Event() for _ in numbers]
            streams = [
                asked.create_task(stream(client, body, timeout_ms, mark))
                for mark, body in zip(marks, bodies, strict=True)
            ]
            for mark in marks:
                await mark.wait()
            return streams

        hasty_ms, patient, hasty = 1500, [], []
        while not hasty or any(task.done() for task in (*patient, *hasty)):
            hasty_ms *= 2  # until all of them can begin in time
            patient, hasty = await asyncio.gather(begun(None), begun(hasty_ms))
        with paused(tight, "scheduler"):  # nobody takes the worker back before all was seen
            tight.signal("expert-1", signal.SIGKILL)
            waiting = [asked.create_task(ask(client, body)) for body in bodies]
            late = await asyncio.gather(*(ask(client, body, 500) for body in bodies))

            async def not_ready() -> bool:
                return (await client.get("/readyz")).status_code != 200

            await until(not_ready)
            refused = await asyncio.gather(
                *(how(client, body) for how in (ask, stream) for body in bodies)
            )
            cut = [await task for task in hasty]
            assert not any(task.done() for task in patient)
        waited = [await task for task in waiting]
        streamed = [await task for task in patient]
        await seen.agreed()

    assert {(o.status, o.error, o.retry_after) for o in late} == {(504, "deadline_exceeded", "1")}
    assert {(o.status, o.error, o.retry_after) for o in refused} == {
        (503, "expert_unavailable", "1")
    }
    for outcome, text in zip(cut, whole, strict=True):  # it had begun: what came is right
        assert (outcome.status, outcome.error) == (200, "deadline_exceeded")
        assert outcome.text
        assert text.startswith(outcome.text)
    assert [outcome.text for outcome in (*waited, *streamed)] == whole * 2
    async with under_load(tight.url, right):
        pass


@pytest.mark.slow
async def test_a_redis_that_hangs_or_loses_everything_changes_nothing(
    tight: Suite, right: list[str]
) -> None:
    def redis() -> dict[str, Any]:
        return next(p for p in tight.state()["processes"] if p["name"] == "redis")

    async with control(tight) as seen, under_load(tight.url, right) as load:
        base, there = await seen.agreed(), await seen.members()

        with paused(tight, "redis"):
            # Nothing shows that leases have ended while nobody can read them.
            await asyncio.sleep(LEASES_END_S)
            await load.round()
        await seen.until_led()
        assert await seen.agreed() == base
        assert await seen.members() == there
        taken = await seen.windows()

        pid, journal = redis()["pid"], tight.directory / redis()["log"]
        tight.signal("redis", signal.SIGKILL)
        shutil.rmtree(journal.with_name("appendonlydir"))
        await until(lambda: redis()["pid"] not in (0, pid))
        await load.round()
        await seen.until_led()
        await until(lambda: events(tight, "scheduler", "placement.republished"))
        assert await seen.agreed() == base
        assert await seen.members() == there
        await seen.until_reported(taken)

        epoch = await seen.apply(rotated(await seen.placement(), 1))
        assert await seen.agreed() == epoch > base
    assert len(events(tight, "scheduler", "placement.republished")) == 1


async def counted(suite: Suite, name: str) -> int:
    """Dispatch batches that one expert worker has counted."""
    async with suite.channel(name) as connection:
        stub = expert_pb2_grpc.ExpertServiceStub(connection)
        request = expert_pb2.ExpertServiceGetActivationsRequest()
        answer = await stub.GetActivations(request, timeout=HANG_S)
    for layer in answer.layers:
        assert sum(layer.tokens) >= layer.batches * 4  # top 4 of every row
        assert max(layer.active) <= layer.batches
    return sum(layer.batches for layer in answer.layers)
