"""Brownout of real suites: policies are followed while requests come, and united experts stand in for a dead worker."""

import asyncio
import json
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.suites import Suite, eventually, running

PROMPTS = [f"Continue the story: {name} went to the river." for name in ("Ana", "Omar", "Mei")]


@dataclass(frozen=True)
class Answer:
    """One answer, or a typed error."""

    asked_s: float
    ended_s: float
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
        return Answer(asked_s, time.monotonic(), exact, response.status_code, code=error["code"])
    quality = told["moesaic"]["quality"]
    return Answer(
        asked_s,
        time.monotonic(),
        exact,
        200,
        told["choices"][0]["message"]["content"],
        quality["degraded_share"],
        quality["mean_threshold"],
    )


def set_policy(suite: Suite, *flags: str, prefill: float = 1.0, decode: float = 1.0) -> None:
    """Set a manual policy, and wait until the worker follows it."""
    thresholds = ("--prefill-threshold", str(prefill), "--decode-threshold", str(decode))
    done = suite.cli("brownout", "set", "--mode", "manual", *thresholds, *flags)
    assert done.returncode == 0, done.stdout + done.stderr

    def followed() -> bool:
        [worker] = json.loads(suite.cli("brownout", "show", "--json").stdout)["workers"]
        return (worker["prefill_threshold"], worker["decode_threshold"]) == (prefill, decode)

    eventually(followed)


@pytest.fixture(params=["local", "disaggregated", "gathered"])
def suite(request: pytest.FixtureRequest, tmp_path: Any) -> Iterator[Suite]:
    with running(tmp_path, "--topology", request.param) as started:
        yield started


@pytest.mark.timeout(240)
async def test_a_policy_is_followed_while_requests_come_and_exact_ones_do_not_change(
    suite: Suite,
) -> None:
    async with httpx.AsyncClient(base_url=suite.url, timeout=60) as client:
        before = [await ask(client, number) for number in range(3)]
        assert all((answer.share, answer.threshold) == (0, 1) for answer in before)
        under_way = True
        answers: list[Answer] = []

        async def keep_asking() -> None:
            number = 0
            while under_way:
                pair = ask(client, number), ask(client, number, exact=True)
                answers.extend(await asyncio.gather(*pair))
                number += 1

        asking = asyncio.ensure_future(keep_asking())
        for flags in (
            ("--way", "4"),
            ("--way", "8", "--rule", "error"),
            ("--way", "0", "--rule", "tokens"),
        ):
            await asyncio.to_thread(set_policy, suite, *flags, prefill=0.2, decode=0.4)
            eventually_s = time.monotonic() + 60
            seen = len(answers)
            while not any(answer.share > 0 for answer in answers[seen:]):
                assert time.monotonic() < eventually_s, f"nothing was degraded with {flags}"
                await asyncio.sleep(0.1)
        await asyncio.to_thread(suite.cli, "brownout", "set", "--mode", "off")
        await asyncio.sleep(3)
        under_way = False
        await asking
        after = [await ask(client, number) for number in range(3)]

    assert all(answer.status == 200 for answer in answers)
    texts = [answer.text for answer in before]
    exact = [answer for answer in answers if answer.exact]
    assert all((answer.share, answer.threshold) == (0, 1) for answer in exact)
    assert {answer.text for answer in exact} <= set(texts)
    degraded = [answer for answer in answers if answer.share > 0]
    assert all(0.2 <= answer.threshold < 1 for answer in degraded)
    assert [answer.text for answer in after] == texts
    assert all((answer.share, answer.threshold) == (0, 1) for answer in after)


@pytest.mark.timeout(240)
async def test_the_only_holder_of_experts_dies_and_nobody_is_turned_away(tmp_path: Any) -> None:
    """Standard requests go on with united experts and say so; exact ones wait; then all is exact again."""
    with running(tmp_path) as suite:
        set_policy(suite, "--way", "4")
        await asyncio.sleep(2)  # until the united experts are placed
        async with httpx.AsyncClient(base_url=suite.url, timeout=60) as client:
            texts = [(await ask(client, number)).text for number in range(3)]
            answers: list[asyncio.Task[Answer]] = []
            killed_s = 0.0
            for number in range(60):
                answers += [
                    asyncio.ensure_future(ask(client, number)),
                    asyncio.ensure_future(ask(client, number, exact=True)),
                ]
                if number == 8:
                    killed_s = time.monotonic()
                    suite.signal("expert-1", signal.SIGKILL)
                await asyncio.sleep(0.25)
            with suppress(TimeoutError):
                async with asyncio.timeout(60):
                    await asyncio.gather(*answers)
        told = [task.result() for task in answers]

    assert all(answer.status == 200 for answer in told if not answer.exact)
    assert {answer.code for answer in told if answer.status != 200} <= {"expert_unavailable"}
    degraded = [answer for answer in told if answer.share > 0]
    assert degraded
    assert not any(answer.exact for answer in degraded)
    assert min(answer.ended_s for answer in degraded) - killed_s < 5  # of a hang, not of speed
    clean = [answer for answer in told if answer.status == 200 and not answer.share]
    assert {answer.text for answer in clean} <= set(texts)
    last = max(answer.asked_s for answer in told)
    assert all(answer.share == 0 for answer in told if answer.asked_s == last)
