"""Brownout of real suites: policies are followed while requests come, and united experts stand in for a dead worker."""

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.suites import Suite
from tests.system.control import control
from tests.waiting import HANG_S, POLL_S, eventually, until

NUM_EXPERTS = 32  # of the demo model; united ones follow
PROMPTS = [f"Continue the story: {name} went to the river." for name in ("Ana", "Omar", "Mei")]


@dataclass(frozen=True)
class Answer:
    """One answer, or a typed error."""

    asked_s: float
    exact: bool
    status: int
    text: str = ""
    share: float = 0.0
    threshold: float = 1.0
    code: str = ""


async def ask(client: httpx.AsyncClient, number: int, exact: bool = False) -> Answer:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": PROMPTS[number % len(PROMPTS)]}],
        "max_tokens": 24,
        "temperature": 0,
    }
    if exact:
        body["moesaic"] = {"quality": "exact"}
    asked_s = time.monotonic()
    response = await client.post("/v1/chat/completions", json=body)
    told = response.json()
    if response.status_code != 200:
        error = told["error"]
        return Answer(asked_s, exact, response.status_code, code=error["code"])
    quality = told["moesaic"]["quality"]
    return Answer(
        asked_s,
        exact,
        200,
        told["choices"][0]["message"]["content"],
        quality["degraded_share"],
        quality["mean_threshold"],
    )


def set_policy(suite: Suite, *flags: str, prefill: float = 1.0, decode: float = 1.0) -> None:
    """Set a manual policy, and wait until the workers follow it."""
    thresholds = ("--prefill-threshold", str(prefill), "--decode-threshold", str(decode))
    done = suite.cli("brownout", "set", "--mode", "manual", *thresholds, *flags)
    assert done.returncode == 0, done.stdout + done.stderr

    def followed() -> bool:
        workers = json.loads(suite.cli("brownout", "show", "--json").stdout)["workers"]
        now = [(worker["prefill_threshold"], worker["decode_threshold"]) for worker in workers]
        return set(now) == {(prefill, decode)}

    eventually(followed)


@pytest.fixture
def suite(request: pytest.FixtureRequest) -> Iterator[Suite]:
    """The suite of this name, without brownout after the test."""
    suite = request.getfixturevalue(request.param)
    yield suite
    done = suite.cli("brownout", "set", "--mode", "off", "--way", "0", "--rule", "tokens")
    assert done.returncode == 0, done.stdout + done.stderr
    eventually(lambda: is_over(suite))


def is_over(suite: Suite) -> bool:
    """Check whether workers follow no policy any more, and no united expert is placed."""
    workers = json.loads(suite.cli("brownout", "show", "--json").stdout)["workers"]
    placement = json.loads(suite.cli("placement", "show", "--json").stdout)["placement"]
    placed = [w["experts"] for w in placement["workers"]] if placement else []
    most = max((e for layers in placed for experts in layers for e in experts), default=0)
    return {worker["mode"] for worker in workers} == {"off"} and most < NUM_EXPERTS


class Asked:
    """Answers of clients that ask again and again, some of them for exact ones."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []

    async def until(self, wanted: Callable[[Answer], bool]) -> None:
        """Wait for such an answer to a request that has not been made yet."""
        now_s = time.monotonic()
        await until(lambda: any(a.asked_s >= now_s and wanted(a) for a in self.answers))


@asynccontextmanager
async def asked_again_and_again(client: httpx.AsyncClient) -> AsyncIterator[Asked]:
    """Ask all prompts at a time for the length of the block, in both qualities."""
    asked, done = Asked(), asyncio.Event()

    async def asking(number: int, exact: bool) -> None:
        while not done.is_set():
            asked.answers.append(answer := await ask(client, number, exact))
            if answer.status != 200:
                await asyncio.sleep(POLL_S)

    async with asyncio.TaskGroup() as clients:
        for number in range(len(PROMPTS)):
            for exact in (False, True):
                clients.create_task(asking(number, exact))
        yield asked
        done.set()


@pytest.mark.parametrize(
    "suite",
    [
        "disaggregated",
        pytest.param("local", marks=pytest.mark.slow),
        pytest.param("gathered", marks=pytest.mark.slow),
    ],
    indirect=True,
)
async def test_a_policy_is_followed_while_requests_come_and_exact_ones_do_not_change(
    suite: Suite,
) -> None:
    async with httpx.AsyncClient(base_url=suite.url, timeout=HANG_S) as client:
        before = [await ask(client, number) for number in range(len(PROMPTS))]
        assert all((answer.share, answer.threshold) == (0, 1) for answer in before)
        async with asked_again_and_again(client) as asked:
            for flags in (
                ("--way", "4"),
                ("--way", "8", "--rule", "instances"),
                ("--way", "0", "--rule", "tokens"),
            ):
                await asyncio.to_thread(set_policy, suite, *flags, prefill=0.2, decode=0.4)
                await asked.until(lambda answer: answer.share > 0)
            await asyncio.to_thread(set_policy, suite)
        answers = asked.answers
        after = [await ask(client, number) for number in range(len(PROMPTS))]

    assert all(answer.status == 200 for answer in answers)
    texts = [answer.text for answer in before]
    exact = [answer for answer in answers if answer.exact]
    assert all((answer.share, answer.threshold) == (0, 1) for answer in exact)
    assert {answer.text for answer in exact} <= set(texts)
    degraded = [answer for answer in answers if answer.share > 0]
    assert all(0.2 <= answer.threshold < 1 for answer in degraded)
    assert [answer.text for answer in after] == texts
    assert all((answer.share, answer.threshold) == (0, 1) for answer in after)


@pytest.mark.parametrize("suite", ["disaggregated"], indirect=True)
async def test_the_only_holder_of_experts_dies_and_nobody_is_turned_away(suite: Suite) -> None:
    """Standard requests go on with united experts and say so; exact ones wait; then all is exact again."""
    set_policy(suite, "--way", "4")
    async with (
        control(suite) as seen,
        httpx.AsyncClient(base_url=suite.url, timeout=HANG_S) as client,
    ):

        async def united_are_placed() -> bool:
            placement = await seen.placement()
            epochs = {(await seen.slots(name)).epoch for name in seen.workers}
            return placement.num_united > 0 and epochs == {placement.epoch}

        await until(united_are_placed)
        texts = [(await ask(client, number)).text for number in range(len(PROMPTS))]
        async with asked_again_and_again(client) as asked:
            await until(lambda: len(asked.answers) > len(PROMPTS))
            with suite.unsupervised():
                suite.signal("expert-1", signal.SIGKILL)
                # It cannot be that they waited for it: it is not there.
                await asked.until(lambda answer: answer.share > 0)
            await asked.until(lambda answer: not answer.exact and answer.share == 0)

    assert all(answer.status == 200 for answer in asked.answers if not answer.exact)
    refused = {answer.code for answer in asked.answers if answer.status != 200}
    assert refused <= {"expert_unavailable"}
    assert not any(answer.exact for answer in asked.answers if answer.share > 0)
    clean = [answer for answer in asked.answers if answer.status == 200 and not answer.share]
    assert {answer.text for answer in clean} <= set(texts)
