"""All attention workers are stopped for a while, or the only one dies: no answer is lost or changed."""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from tests.system.asking import Outcome, question, stream
from tests.waiting import HANG_S

STREAMS = 20
TOKENS = 64
WORKER = "attention-0"
PENALTIES = {"presence_penalty": 0.4, "frequency_penalty": 0.3}
Fault = Callable[[Any], Awaitable[None]]


def stopped_for(seconds: float, *workers: str) -> Fault:
    """A pause of workers, as of a machine that is migrated or swaps."""

    async def pause(suite: Any) -> None:
        for worker in workers or (WORKER,):
            suite.signal(worker, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)  # the pause itself
        finally:
            for worker in workers or (WORKER,):
                suite.signal(worker, signal.SIGCONT)

    return pause


async def killed(suite: Any) -> None:
    """A death of the worker, which the supervisor restarts."""
    suite.signal(WORKER, signal.SIGKILL)


async def ask_all(client: httpx.AsyncClient, marks: list[asyncio.Event]) -> list[Outcome]:
    """Streams of which half are greedy, and half are drawn by seeds, with penalties."""
    greedy = (question(n, TOKENS) for n in range(0, STREAMS, 2))
    drawn = (question(n, TOKENS, 0.9) | PENALTIES for n in range(1, STREAMS, 2))
    asked = zip((*greedy, *drawn), marks, strict=True)
    return await asyncio.gather(*(stream(client, body, None, mark) for body, mark in asked))


async def classified(client: httpx.AsyncClient) -> list[Any]:
    body = {
        "input": [f"Play track {n} of that album" for n in range(40)],
        "labels": ["music", "travel", "food"],
    }
    response = await client.post("/v1/classify", json=body)
    response.raise_for_status()
    return [[row["label"], row["probs"]] for row in response.json()["data"]]


@pytest.mark.parametrize(
    ("topology", "fault"),
    [
        pytest.param("local", stopped_for(3.0), id="local-3s"),
        pytest.param("local", stopped_for(8.0), id="local-8s", marks=pytest.mark.slow),
        pytest.param("local", killed, id="local-kill", marks=pytest.mark.slow),
        pytest.param("disaggregated", stopped_for(3.0), id="split-3s", marks=pytest.mark.slow),
        pytest.param("disaggregated", stopped_for(8.0), id="split-8s", marks=pytest.mark.slow),
        pytest.param("disaggregated", killed, id="split-kill", marks=pytest.mark.slow),
        pytest.param("pair", stopped_for(6.0, WORKER, "attention-1"), id="pair-6s"),
        pytest.param(
            "wide",
            stopped_for(6.0, WORKER, "attention-1"),
            id="wide-6s",
            marks=pytest.mark.slow,
        ),
    ],
)
async def test_losing_all_attention_workers_for_a_while_costs_no_request(
    request: pytest.FixtureRequest, topology: str, fault: Fault
) -> None:
    suite = request.getfixturevalue(topology)
    suite.until_serving()
    async with httpx.AsyncClient(base_url=suite.url, timeout=HANG_S) as client:
        marks = [asyncio.Event() for _ in range(STREAMS)]
        undisturbed = await ask_all(client, marks)
        labels = await classified(client)

        classifying = asyncio.create_task(classified(client))
        marks = [asyncio.Event() for _ in range(STREAMS)]
        asking = asyncio.create_task(ask_all(client, marks))
        for mark in marks:
            await mark.wait()
        await fault(suite)
        disturbed, relabelled = await asyncio.gather(asking, classifying)
    suite.until_serving()

    assert [o.error for o in disturbed] == [None] * STREAMS
    assert [(o.text, o.tokens) for o in disturbed] == [(o.text, o.tokens) for o in undisturbed]
    assert [label for label, _ in relabelled] == [label for label, _ in labels]
