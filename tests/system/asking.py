"""Clients that ask a suite, streamed or not, and know what it must answer."""

import asyncio
import json
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from tests.waiting import HANG_S, until

TYPED = {  # how a request may end whose workers are lost
    "expert_unavailable",
    "worker_lost",
    "deadline_exceeded",
    "no_attention_worker",
    "not_ready",
}
QUESTIONS = 6  # of a load: greedy and seeded, each streamed and not
TOKENS = 24
PAUSE_S = 0.1  # of a user between two questions, which leaves the cores to what is tested

PROMPTS = [
    "The king said to his",
    "Up, and to the office, where",
    "It was in the spring of the year 1881 that",
    "A",
    "ROMEO:\n",
    "The Wikipedia article about the history of",
]


@dataclass(frozen=True)
class Outcome:
    """The end of one request."""

    text: str
    tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None  # the code of a typed error
    status: int = 200
    retry_after: str | None = None


def question(number: int, tokens: int, temperature: float = 0) -> dict[str, Any]:
    """A completion of one of many prompts; with a temperature, drawn by a seed of its own."""
    return {
        "model": "demo",
        "prompt": f"The {number}th man went to the town of London and",
        "max_tokens": tokens,
        "temperature": temperature,
        "seed": number,
        "ignore_eos": True,
    }


async def ask(
    client: httpx.AsyncClient, body: dict[str, Any], timeout_ms: int | None = None
) -> Outcome:
    """The answer in one piece, or a typed error."""
    response = await client.post("/v1/completions", json=body, headers=_headers(timeout_ms))
    if response.status_code != 200:
        return _refused(response, response.content)
    answer = response.json()
    choice, tokens = answer["choices"][0], answer["usage"]["completion_tokens"]
    return Outcome(choice["text"], tokens, choice["finish_reason"])


def complete(suite: Any, prompt: str) -> dict[str, Any]:
    """The greedy completion of a prompt, with its token ids; for tests without a loop."""
    with suite.client() as client:
        answer = client.post(
            "/v1/completions",
            json={
                "model": "demo",
                "prompt": prompt,
                "max_tokens": 48,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            },
        )
    assert answer.status_code == 200, answer.text
    return dict(answer.json()["choices"][0])


async def stream(
    client: httpx.AsyncClient,
    body: dict[str, Any],
    timeout_ms: int | None = None,
    begun: asyncio.Event | None = None,
) -> Outcome:
    """Ask for a stream and check every rule of it; its first text sets ``begun``, or its end."""
    try:
        return await _checked_stream(client, body, timeout_ms, begun)
    finally:
        if begun is not None:
            begun.set()


async def _checked_stream(
    client: httpx.AsyncClient,
    body: dict[str, Any],
    timeout_ms: int | None,
    begun: asyncio.Event | None,
) -> Outcome:
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    text, tokens, reason, error, done = "", 0, None, None, False
    async with client.stream(
        "POST", "/v1/completions", json=body, headers=_headers(timeout_ms)
    ) as response:
        if response.status_code != 200:
            return _refused(response, await response.aread())
        async for line in response.aiter_lines():
            assert not (done and line), "nothing follows [DONE]"
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    error = chunk["error"]["code"]
                elif chunk.get("usage"):
                    tokens = chunk["usage"]["completion_tokens"]
                if chunk.get("choices"):
                    text += chunk["choices"][0]["text"]
                    reason = chunk["choices"][0]["finish_reason"] or reason
                    if begun is not None:
                        begun.set()
    assert done, "a stream ended without [DONE]"
    assert (reason is None) != (error is None), "a stream ends with a reason or an error, not both"
    return Outcome(text, tokens, reason, error)


async def of_load(client: httpx.AsyncClient, number: int) -> Outcome:
    """One of the questions of a load."""
    body = question(number, TOKENS, temperature=0.8 if number % 2 else 0)
    return await (stream if number % 3 == 0 else ask)(client, body)


class Load:
    """Questions that are asked again and again."""

    def __init__(self) -> None:
        self.answered = [0] * QUESTIONS

    async def round(self) -> None:
        """Wait until each has been asked and answered once more."""
        wanted = [count + 2 for count in self.answered]  # one is under way
        await until(lambda: all(n >= w for n, w in zip(self.answered, wanted, strict=True)))


@asynccontextmanager
async def under_load(
    url: str, right: Sequence[str], typed: Collection[str] = ()
) -> AsyncIterator[Load]:
    """Ask for the length of the block, and once more after it; every answer is the right one, or
    ends with one of these errors after the beginning of it."""
    done, load = asyncio.Event(), Load()

    async def again_and_again(client: httpx.AsyncClient, number: int) -> None:
        while not done.is_set():
            outcome = await of_load(client, number)
            if outcome.error in typed:
                assert right[number].startswith(outcome.text), f"question {number}: {outcome}"
                await asyncio.sleep(PAUSE_S)
                continue
            said = (outcome.error, outcome.text)
            assert said == (None, right[number]), f"question {number}: {outcome}"
            load.answered[number] += 1
            await asyncio.sleep(PAUSE_S)

    async with (
        httpx.AsyncClient(base_url=url, timeout=HANG_S) as client,
        asyncio.TaskGroup() as asking,
    ):
        for number in range(QUESTIONS):
            asking.create_task(again_and_again(client, number))
        await until(lambda: all(load.answered))
        yield load
        await load.round()
        done.set()


def _headers(timeout_ms: int | None) -> dict[str, str]:
    return {"X-Request-Timeout-Ms": str(timeout_ms)} if timeout_ms else {}


def _refused(response: httpx.Response, body: bytes) -> Outcome:
    code, headers = json.loads(body)["error"]["code"], response.headers
    return Outcome("", 0, None, code, response.status_code, headers.get("retry-after"))
