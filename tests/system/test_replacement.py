"""Experts move, schedulers and workers die meanwhile, and nobody who asks notices."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from moesaic.cluster.channels import channel
from moesaic.v1 import expert_pb2, expert_pb2_grpc
from tests.suites import Suite, running

PROMPTS = 6
TOKENS = 24
SETTINGS = {  # a suite that is quick to report and to act, and does nothing by itself
    "MOESAIC_ACTIVATION_WINDOW_S": "0.5",
    "MOESAIC_MIN_EPOCH_INTERVAL_S": "0",
    "MOESAIC_REPLAN_INTERVAL_S": "3600",
    "MOESAIC_LOAD_SHARE": "0.02",  # loading takes long enough to be met in its middle
}


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suite]:
    """Three expert workers with 14 slots for 32 experts: some have replicas, most have none."""
    with pytest.MonkeyPatch.context() as environment:
        for name, value in SETTINGS.items():
            environment.setenv(name, value)
        flags = ("--experts", "3", "--slots-per-layer", "14")
        with running(tmp_path_factory.mktemp("tight"), *flags) as suite:
            yield suite


async def answer(client: httpx.AsyncClient, number: int, timeout_ms: int = 60_000) -> str:
    """The text of one completion, or the code of a typed error."""
    body = {
        "model": "demo",
        "prompt": f"The {number}th man went to the town of London and",
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
    headers = {"X-Request-Timeout-Ms": str(timeout_ms)}
    response = await client.post("/v1/completions", json=body, headers=headers)
    if response.status_code != 200:
        return f"error: {response.json()['error']['code']}"
    return str(response.json()["choices"][0]["text"])


@pytest.fixture(scope="module")
def reference(local: Suite) -> list[str]:
    """What one process that holds all experts answers."""

    async def ask() -> list[str]:
        async with httpx.AsyncClient(base_url=local.url, timeout=60) as client:
            return [await answer(client, number) for number in range(PROMPTS)]

    return asyncio.run(ask())


@asynccontextmanager
async def under_load(suite: Suite, reference: list[str]) -> AsyncIterator[httpx.AsyncClient]:
    """Ask the same questions again and again for the length of the block; every answer is right."""
    done = asyncio.Event()
    answered = [0] * PROMPTS

    async def ask_again_and_again(client: httpx.AsyncClient, number: int) -> None:
        while not done.is_set() or not answered[number]:
            assert await answer(client, number) == reference[number]
            answered[number] += 1

    async with (
        httpx.AsyncClient(base_url=suite.url, timeout=90) as client,
        asyncio.TaskGroup() as asking,
    ):
        for number in range(PROMPTS):
            asking.create_task(ask_again_and_again(client, number))
        await until(lambda: all(answered))
        yield client
        before = list(answered)  # of the time after whatever happened
        await until(lambda: all(now > then for now, then in zip(answered, before, strict=True)))
        done.set()


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.05)


async def cli(suite: Suite, *arguments: str) -> Any:
    """What a command prints as JSON."""
    done = await asyncio.to_thread(suite.cli, *arguments, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


async def epoch_of(suite: Suite) -> int:
    return int((await cli(suite, "placement", "show"))["placement"]["epoch"])


async def planned(suite: Suite, file: Path) -> dict[str, Any]:
    """A plan that moves experts: of one of two policies at least, for they disagree."""
    for policy in ("eplb", "uniform"):
        plan = await cli(suite, "placement", "plan", "--policy", policy, "--out", str(file))
        if plan["moves"]:
            return dict(plan)
    raise AssertionError("no policy moves anything")


@pytest.mark.timeout(120)
async def test_experts_move_under_load_and_no_answer_changes(
    tight: Suite, reference: list[str], tmp_path: Path
) -> None:
    plan_file = tmp_path / "plan.json"
    async with under_load(tight, reference):
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
        for entry in tight.log(f"expert-{number}")
        if entry["event"] == "placement.prepared" and entry["epoch"] == applied["epoch"]
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
async def test_a_scheduler_and_a_redis_that_die_while_experts_load_cost_nothing(
    tight: Suite, reference: list[str], tmp_path: Path
) -> None:
    plan_file = tmp_path / "plan.json"
    async with under_load(tight, reference):
        for victim in ("scheduler", "redis"):
            plan = await planned(tight, plan_file)
            began = count(tight, "placement.planned")
            pid = tight.pid(victim)
            applying = asyncio.create_task(
                asyncio.to_thread(tight.cli, "placement", "apply", str(plan_file))
            )
            await until(lambda: count(tight, "placement.planned") > began)  # noqa: B023
            tight.signal(victim, signal.SIGKILL)

            assert (await applying).returncode in (0, 1, 3)  # too late for some deaths
            await until(lambda: tight.pid(victim) not in (0, pid))  # noqa: B023
            await until(lambda: tight.cli("placement", "plan").returncode == 0)
            assert await epoch_of(tight) >= plan["base_epoch"]

        plan = await planned(tight, plan_file)
        applied = await cli(tight, "placement", "apply", str(plan_file))
        assert applied["epoch"] > plan["base_epoch"]
    given_out = [e["epoch"] for e in tight.log("scheduler") if e["event"] == "placement.planned"]
    assert given_out == sorted(set(given_out))  # none twice, none lower than one before


@pytest.mark.timeout(180)
async def test_the_loss_of_sole_holders_delays_answers_or_gives_typed_errors(
    tight: Suite, reference: list[str]
) -> None:
    async with httpx.AsyncClient(base_url=tight.url, timeout=90) as client:
        tight.signal("expert-1", signal.SIGKILL)  # the others cannot hold all experts
        hasty, patient = await asyncio.gather(
            asyncio.gather(*(answer(client, n, timeout_ms=400) for n in range(PROMPTS))),
            asyncio.gather(*(answer(client, n) for n in range(PROMPTS))),
        )

        typed = {"error: deadline_exceeded", "error: expert_unavailable", "error: worker_lost"}
        for text, right in zip(hasty, reference, strict=True):
            assert text in {right, *typed}
        assert patient == reference
    tight.until_ready()


async def counted(suite: Suite, name: str) -> int:
    """Dispatch batches that one expert worker has counted."""
    processes = suite.state()["processes"]
    address = next(p["admin_address"] for p in processes if p["name"] == name)
    async with channel(address) as connection:
        stub = expert_pb2_grpc.ExpertServiceStub(connection)
        request = expert_pb2.ExpertServiceGetActivationsRequest()
        answer = await stub.GetActivations(request, timeout=10)
    for layer in answer.layers:
        assert sum(layer.tokens) >= layer.batches * 4  # top 4 of every row
        assert max(layer.active) <= layer.batches
    return sum(layer.batches for layer in answer.layers)


def count(suite: Suite, event: str) -> int:
    return sum(entry["event"] == event for entry in suite.log("scheduler"))
