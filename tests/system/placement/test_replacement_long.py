"""The long part of ``test_replacement.py``: outages of half a minute, leases that end by themselves,
requests that nobody saves, deaths at random moments."""

import asyncio
import random
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import grpc
import httpx
import pytest

from moesaic.cluster.placement_view import committed_epoch
from moesaic.cluster.redis.child import start_redis
from moesaic.messages.placement import Placement
from tests.suites import Suite, running
from tests.system.asking import TYPED, ask, question, stream, under_load
from tests.system.control import (
    SETTINGS,
    Control,
    another_scheduler,
    control,
    events,
    paused,
    rotated,
)
from tests.waiting import HANG_S

RECOVERING = {**SETTINGS, "MOESAIC_RECOVERY_S": "8"}
OUTAGE_S = 30.0
ROUNDS = 12  # of deaths at random moments
LONG = 160  # tokens: more than come before a fault

pytestmark = pytest.mark.slow


class OwnRedis:
    """A Redis that only the test starts again."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._process: subprocess.Popen[bytes]
        self.url = ""
        self.start()

    def start(self) -> None:
        """Run with what is left of the data."""
        self._process, self.url = start_redis(self._directory)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to it."""
        self._process.send_signal(number)

    def kill(self, *, lose_data: bool = False) -> None:
        """End it at once."""
        self._process.kill()
        self._process.wait()
        if lose_data:
            shutil.rmtree(self._directory / "appendonlydir")


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnRedis]:
    """The Redis in which the suite keeps its control metadata."""
    redis = OwnRedis(tmp_path_factory.mktemp("redis"))
    yield redis
    redis.kill()


@pytest.fixture(scope="module")
def hosted(tmp_path_factory: pytest.TempPathFactory, redis: OwnRedis) -> Iterator[Suite]:
    """Three expert workers with 14 slots for 32 experts, on that Redis."""
    flags = ("--experts", "3", "--slots-per-layer", "14")
    settings = RECOVERING | {"MOESAIC_REDIS_URL": redis.url}
    with running(tmp_path_factory.mktemp("hosted"), *flags, settings=settings) as suite:
        yield suite


@pytest.mark.parametrize("fate", ["hangs", "dies", "dies and forgets"])
async def test_half_a_minute_without_redis_is_not_noticed(
    hosted: Suite, redis: OwnRedis, right: list[str], fate: str
) -> None:
    async with control(hosted) as seen, under_load(hosted.url, right) as load:
        await seen.until_led()
        base, there = await seen.agreed(), await seen.members()

        if fate == "hangs":
            redis.signal(signal.SIGSTOP)
        else:
            redis.kill(lose_data=fate == "dies and forgets")
        try:
            # The outage is what is tested: only time can show that nobody minds.
            await asyncio.sleep(OUTAGE_S)
            await load.round()
        finally:
            if fate == "hangs":
                redis.signal(signal.SIGCONT)
            else:
                redis.start()

        await seen.until_led()
        assert await seen.agreed() == base
        assert await seen.members() == there
        taken = await seen.windows()
        await seen.until_reported(taken)
        epoch = await seen.apply(rotated(await seen.placement(), 1))
        assert await seen.agreed() == epoch > base


@pytest.mark.parametrize("successor", ["commits", "only leads"])
async def test_a_scheduler_that_slept_until_its_lease_ended_commits_nothing(
    hosted: Suite, right: list[str], successor: str
) -> None:
    async with (
        control(hosted) as seen,
        under_load(hosted.url, right),
        another_scheduler(hosted, "standby") as standby,
    ):
        await seen.until_led()
        await seen.settled()
        address = (await standby.until("service.ready"))["admin_address"]
        async with seen.moving(2, loaded=True) as move:
            commits = len(events(hosted, "scheduler", "placement.committed"))
            await standby.until("leader.changed", leads=True)
            if successor == "commits":
                await seen.apply(rotated(await seen.placement(), 1), address)
        with pytest.raises(grpc.aio.AioRpcError):
            await move.applying
        await seen.until_follows("standby")
        assert len(events(hosted, "scheduler", "placement.committed")) == commits
        assert await committed_epoch(seen.bus) != move.epoch
        assert (await seen.settled() > move.before.epoch) == (successor == "commits")


async def test_requests_that_wait_too_long_for_a_lost_expert_get_a_typed_error(
    hosted: Suite, local: Suite, right: list[str]
) -> None:
    bodies = [question(number, LONG) for number in range(4)]
    async with httpx.AsyncClient(base_url=local.url, timeout=HANG_S) as client:
        whole = [(await ask(client, body)).text for body in bodies]

    async with (
        httpx.AsyncClient(base_url=hosted.url, timeout=HANG_S) as client,
        control(hosted) as seen,
        asyncio.TaskGroup() as asked,
    ):
        await seen.until_led()
        await seen.settled()
        begun = [asyncio.Event() for _ in bodies]
        streams = [
            asked.create_task(stream(client, body, None, mark))
            for body, mark in zip(bodies, begun, strict=True)
        ]
        for mark in begun:
            await mark.wait()
        with paused(hosted, "scheduler"):
            hosted.signal("expert-2", signal.SIGKILL)
            plain = [asked.create_task(ask(client, body)) for body in bodies]
            silent = [asked.create_task(stream(client, body)) for body in bodies]
            cut = [await task for task in streams]
            failed = [await task for task in (*plain, *silent)]
        await seen.settled()

    assert {(o.status, o.error, o.retry_after) for o in failed} == {
        (503, "expert_unavailable", "1")
    }
    for outcome, text in zip(cut, whole, strict=True):
        assert (outcome.status, outcome.error) == (200, "expert_unavailable")
        assert outcome.text
        assert text.startswith(outcome.text)
    async with under_load(hosted.url, right):
        pass


@pytest.mark.parametrize("seed", [1, 2])
async def test_deaths_at_random_moments_leave_one_epoch_and_right_answers(
    hosted: Suite, redis: OwnRedis, right: list[str], seed: int
) -> None:
    rng, names = random.Random(seed), (f"standby-{seed}-{n}" for n in range(ROUNDS + 1))
    loading = under_load(hosted.url, right, TYPED)  # sole holders die as well
    async with control(hosted) as seen, loading, AsyncExitStack() as parts:
        standby = await parts.enter_async_context(another_scheduler(hosted, next(names)))
        for _ in range(ROUNDS):
            base = await seen.settled()
            address = (await standby.until("service.ready"))["admin_address"]
            wanted = rotated(await seen.placement(), rng.randint(1, 3))
            applying = asyncio.create_task(_apply(seen, wanted, address))
            await asyncio.sleep(rng.uniform(0.0, 4.0))
            for victim in rng.choice(FATES):
                if victim == "redis":
                    redis.kill()
                    await asyncio.sleep(rng.uniform(0.0, 2.0))
                    redis.start()
                elif victim == "standby":
                    standby.process.kill()
                elif hosted.pid(victim):  # else it is being started again
                    hosted.signal(victim, signal.SIGKILL)
            await applying
            assert await seen.settled() >= base
            if standby.process.returncode is not None:
                standby = await parts.enter_async_context(another_scheduler(hosted, next(names)))
    given_out = [entry["epoch"] for entry in events(hosted, "scheduler", "placement.planned")]
    assert len(given_out) == len(set(given_out))


async def _apply(seen: Control, wanted: Placement, standby: str) -> None:
    """Ask whoever leads; what comes of it is seen elsewhere."""
    for address in ("", standby):
        with suppress(grpc.aio.AioRpcError):
            await seen.apply(wanted, address)


FATES = [
    ("scheduler",),
    ("standby",),
    ("scheduler", "standby"),
    ("scheduler", "redis"),
    ("redis",),
    ("expert-0",),
    ("expert-1", "scheduler"),
    ("redis", "standby", "scheduler"),
]
