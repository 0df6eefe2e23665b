"""Many streams at once, without and with a fault in their middle."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from tests.system.asking import TYPED, Outcome, question, stream

STREAMS = 50
TOKENS = 32


async def around_fault(
    suite: Any, fault: Callable[[], None], timeout_ms: int | None = None
) -> tuple[list[Outcome], list[Outcome]]:
    """Outcomes of the same streams without and with a fault in their middle."""
    async with httpx.AsyncClient(base_url=suite.url, timeout=90) as client:
        undisturbed = await asyncio.gather(
            *(stream(client, question(n, TOKENS)) for n in range(STREAMS))
        )
        assert {o.finish_reason for o in undisturbed} == {"length"}
        tasks: list[Awaitable[Outcome]] = [
            asyncio.create_task(stream(client, question(n, TOKENS), timeout_ms))
            for n in range(STREAMS)
        ]
        await asyncio.sleep(0.5)
        fault()
        disturbed = await asyncio.wait_for(asyncio.gather(*tasks), 80)
    return undisturbed, disturbed


def check(undisturbed: list[Outcome], disturbed: list[Outcome]) -> int:
    """No stream is lost, cut short silently, or wrong; returns how many came through whole."""
    for before, after in zip(undisturbed, disturbed, strict=True):
        if after.error is None:
            assert (after.text, after.tokens) == (before.text, TOKENS)
        else:
            assert after.error in TYPED
            assert before.text.startswith(after.text)
    return sum(o.error is None for o in disturbed)
