"""Experts move; workers, schedulers and Redis die or hang meanwhile; every answer is still the one that a
single process gives. What takes longer is in ``test_replacement_long.py``."""

import asyncio
import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from moesaic.cluster.placement_view import committed_epoch
from moesaic.v1 import expert_pb2, expert_pb2_grpc
from tests.suites import Suite, running
from tests.system.asking import Outcome, ask, question, stream, under_load, until
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

LONG = 160  # tokens: more than come before a fault
LEASES_END_S = 7.0  # all leases of workers end within that time


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suite]:
    """Three expert workers with 14 slots for 32 experts: some have replicas, most have none."""
    flags = ("--experts", "3", "--slots-per-layer", "14")
    with running(tmp_path_factory.mktemp("tight"), *flags, settings=SETTINGS) as suite:
        yield suite


@pytest.mark.timeout(240)
async def test_experts_move_under_load_and_no_answer_changes(
    tight: Suite, right: list[str], tmp_path: Path
) -> None:
    plan_file = tmp_path / "plan.json"
    async with under_load(tight.url, right):
        await until(lambda: tight.cli("experts", "ls", "--json").stdout.count("null") == 0)
        plan = await planned(tight, plan_file)
        assert plan["sampled_batches"] > 0
        assert 0 < plan["activated_after"] <= 14
        changes = await cli(tight, "placement", "diff", str(plan_file))
        assert sum(len(change["loads"]) for change in changes) == len(plan["moves"])

        applied = await cli(tight, "placement", "apply", str(plan_file))
        assert applied["epoch"] > plan["base_epoch"]

    stale = tight.cli("placement", "apply", str(plan_file))
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


@pytest.mark.timeout(180)
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
    async with seen.moving(2) as move:
        with ExitStack() as hung:
            with paused(seen.suite, "scheduler"):
                await seen.until_prepared(move.before, move.after)
                hung.enter_context(paused(seen.suite, worker))
            others = [name for name in seen.workers if name != worker]
            while min([(await seen.slots(name)).epoch for name in others]) < move.epoch:
                if move.applying.done():
                    return None
                await asyncio.sleep(0.02)
            seen.suite.signal("scheduler", signal.SIGKILL)
    return move


@pytest.mark.timeout(240)
async def test_schedulers_that_die_in_any_phase_leave_one_epoch_and_nothing_else(
    tight: Suite, right: list[str]
) -> None:
    async with control(tight) as seen, under_load(tight.url, right):
        base = await seen.settled()

        while (move := await dies_before_telling(seen, "expert-2")) is None:
            base = await seen.settled()
        assert await committed_epoch(seen.bus) == move.epoch  # Redis knows, and one worker does not
        assert (await seen.slots("expert-2")).epoch == base
        base = await seen.agreed()
        assert base == move.epoch

        assert not await seen.is_alone(move.after)  # old experts are still held
        async with seen.moving(2) as move:  # while they are, and workers load others
            tight.signal("scheduler", signal.SIGKILL)
            assert await committed_epoch(seen.bus) == base
        assert await seen.settled() == base

        async with seen.moving(2) as move:  # all have loaded, and Redis does not know yet
            with paused(tight, "scheduler"):
                await seen.until_prepared(move.before, move.after)
                tight.signal("scheduler", signal.SIGKILL)
            assert await committed_epoch(seen.bus) == base
        assert await seen.settled() == base
    given_out = [entry["epoch"] for entry in events(tight, "scheduler", "placement.planned")]
    assert given_out == sorted(set(given_out))  # none twice, none lower than one before


@pytest.mark.timeout(240)
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
        base, before = await seen.settled(), commits()
        address = (await standby.until("service.ready"))["admin_address"]
        async with seen.moving(2) as move:
            with paused(tight, "scheduler"):
                await seen.until_prepared(move.before, move.after)  # the answers wait for it
                await seen.bus.delete("leader:scheduler")  # as its expiry does
                await standby.until("leader.changed", leads=True)
                assert await seen.settled() == base  # what it had prepared is given up
                epoch = await seen.apply(rotated(await seen.placement(), 1), address)
            with pytest.raises(grpc.aio.AioRpcError):
                await move.applying
        waiting_for = ["the lead, which standby has"]
        while (await seen.fleet()).waiting_for != waiting_for:
            await asyncio.sleep(0.05)
        assert commits() == before
        assert await seen.agreed() == epoch > move.epoch
    async with control(tight) as seen:
        await seen.until_led()


@pytest.mark.timeout(240)
async def test_what_clients_see_of_the_loss_of_a_sole_holder(
    tight: Suite, local: Suite, right: list[str]
) -> None:
    numbers = range(4)
    bodies = [question(n, LONG, temperature=0.8 if n % 2 else 0) for n in numbers]
    async with httpx.AsyncClient(base_url=local.url, timeout=90) as client:
        answers = await asyncio.gather(*(ask(client, body) for body in bodies))
    whole = [answer.text for answer in answers]

    async with (
        httpx.AsyncClient(base_url=tight.url, timeout=90) as client,
        control(tight) as seen,
        asyncio.TaskGroup() as asked,
    ):

        def begin(timeout_ms: int | None) -> list[tuple[asyncio.Event, asyncio.Task[Outcome]]]:
            marks = [asyncio.Event() for _ in numbers]
            return [
                (mark, asked.create_task(stream(client, body, timeout_ms, mark)))
                for mark, body in zip(marks, bodies, strict=True)
            ]

        patient, hasty = begin(None), begin(3000)
        for mark, _ in (*patient, *hasty):
            await mark.wait()
        with paused(tight, "scheduler"):  # nobody takes the worker back before all was seen
            tight.signal("expert-1", signal.SIGKILL)
            late = await asyncio.gather(*(ask(client, body, 500) for body in bodies))
            waiting = [asked.create_task(ask(client, body)) for body in bodies]
            while (await client.get("/readyz")).status_code == 200:
                await asyncio.sleep(0.1)
            refused = await asyncio.gather(
                *(how(client, body) for how in (ask, stream) for body in bodies)
            )
            cut = [await task for _, task in hasty]
            assert not any(task.done() for _, task in patient)
        waited = [await task for task in waiting]
        streamed = [await task for _, task in patient]
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


@pytest.mark.timeout(240)
async def test_a_redis_that_hangs_or_loses_everything_changes_nothing(
    tight: Suite, right: list[str]
) -> None:
    def redis() -> dict[str, Any]:
        return next(p for p in tight.state()["processes"] if p["name"] == "redis")

    async with control(tight) as seen, under_load(tight.url, right) as load:
        base, there = await seen.agreed(), await seen.members()

        with paused(tight, "redis"):
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
        assert len(events(tight, "scheduler", "placement.republished")) == 1
        assert await seen.agreed() == base
        assert await seen.members() == there
        while await seen.windows() <= taken:
            await asyncio.sleep(0.05)

        epoch = await seen.apply(rotated(await seen.placement(), 1))
        assert await seen.agreed() == epoch > base


async def counted(suite: Suite, name: str) -> int:
    """Dispatch batches that one expert worker has counted."""
    async with suite.channel(name) as connection:
        stub = expert_pb2_grpc.ExpertServiceStub(connection)
        request = expert_pb2.ExpertServiceGetActivationsRequest()
        answer = await stub.GetActivations(request, timeout=10)
    for layer in answer.layers:
        assert sum(layer.tokens) >= layer.batches * 4  # top 4 of every row
        assert max(layer.active) <= layer.batches
    return sum(layer.batches for layer in answer.layers)
