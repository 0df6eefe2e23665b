"""Requests leave nothing that only garbage collection frees: to look for it holds the loop."""

import asyncio
import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import pytest

REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "whole": ("/v1/completions", {"prompt": "a", "max_tokens": 8}),
    "streamed": ("/v1/completions", {"prompt": "a", "max_tokens": 8, "stream": True}),
    "many": ("/v1/completions", {"prompt": ["a"] * 8, "n": 8, "max_tokens": 8, "stop": ["x"]}),
    "refused": ("/v1/completions", {"prompt": "a", "max_tokens": -1}),
    "too long": ("/v1/completions", {"prompt": "a " * 100_000, "max_tokens": 1}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    "classified": ("/v1/classify", {"input": ["a", "b"], "labels": ["x", "y"]}),
    "tokenized": ("/tokenize", {"prompt": "a"}),
}


@contextmanager
def left_behind() -> Iterator[Counter[str]]:
    """Count objects of ours, by type, that garbage collection finds after the block."""
    found: Counter[str] = Counter()
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield found
        gc.collect()
        names = (f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.garbage)
        found.update(name for name in names if name.startswith("moesaic."))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.parametrize("name", REQUESTS)
async def test_a_request_leaves_no_cycles(open_house: Any, scripts: Any, name: str) -> None:
    path, body = REQUESTS[name]
    async with open_house(scripts.says("yes no")) as house:
        await house.client.post(path, json=body)  # what stays for good is made
        with left_behind() as found:
            for _ in range(3):
                await house.client.post(path, json=body)
            await house.until(lambda: not house.gateway.num_inflight)
    assert not found


async def test_a_request_that_is_given_up_leaves_none_either(open_house: Any) -> None:
    begun = asyncio.Semaphore(0)

    async def never(submit: Any, emit: Any) -> None:
        begun.release()

    async with open_house(never) as house:
        for number in range(2):
            with left_behind() as found:
                body = {"prompt": ["a"] * 4, "stream": number == 0}
                asking = asyncio.ensure_future(house.client.post("/v1/completions", json=body))
                for _ in range(4):
                    await begun.acquire()
                asking.cancel()
                with suppress(asyncio.CancelledError, httpx.HTTPError):
                    await asking
                await house.until(lambda: not house.gateway.num_inflight)
    assert not found
