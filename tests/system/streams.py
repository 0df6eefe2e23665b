"""Many streams at once, without and with a fault in their middle."""

import asyncio
from collections.abc import Callable
from typing import Any

import httpx

from tests.system.asking import TYPED, Outcome, question, stream
from tests.waiting import HANG_S

STREAMS = 50
TOKENS = 32


async def around_fault(
    suite: Any, fault: Callable[[], None], timeout_ms: int | None = None
) -> tuple[list[Outcome], list[Outcome]]:
    """Outcomes of the same streams without and with a fault in their middle."""
    async with httpx.AsyncClient(base_url=suite.url, timeout=HANG_S) as client:
        undisturbed = await asyncio.gather(
            *(stream(client, question(n, TOKENS)) for n in range(STREAMS))
        )
        assert {o.finish_reason for o in undisturbed} == {"length"}
        # After a fault no more are let in: all must have begun. With a deadline, the first must.
        begin = asyncio.ALL_COMPLETED if timeout_ms is None else asyncio.FIRST_COMPLETED
        tasks: list[asyncio.Task[Outcome]] = []
        while all(task.done() for task in tasks):  # of streams that were over too soon
            marks = [asyncio.Event() for _ in range(STREAMS)]
            tasks = [
                asyncio.create_task(stream(client, question(n, TOKENS), timeout_ms, mark))
                for n, mark in enumerate(marks)
            ]
            begun = [asyncio.create_task(mark.wait()) for mark in marks]
            await asyncio.wait(begun, return_when=begin)
        fault()
        disturbed = await asyncio.gather(*tasks)
        await asyncio.gather(*begun)
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
