"""With ``--deterministic`` every bit of an answer is the one of a single process, while experts move."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.suites import Suite, running
from tests.system.asking import question
from tests.system.control import SETTINGS, cli, planned
from tests.waiting import HANG_S

TOKENS = 24


async def asked(url: str, number: int) -> tuple[str, list[Any]]:
    """A greedy answer and its log-probabilities, as the service writes float32 numbers."""
    async with httpx.AsyncClient(base_url=url, timeout=HANG_S) as client:
        body = question(number, TOKENS) | {"logprobs": 3, "cache_salt": str(number)}
        response = await client.post("/v1/completions", json=body)
    response.raise_for_status()
    [choice] = response.json()["choices"]
    return choice["text"], [
        choice["logprobs"]["token_logprobs"],
        choice["logprobs"]["top_logprobs"],
    ]


@pytest.mark.slow
@pytest.mark.parametrize("flags", [("2", "20"), ("3", "14")], ids=["2 experts", "3 experts"])
async def test_every_bit_is_that_of_a_single_process_while_experts_move(
    local: Suite, tmp_path: Path, flags: tuple[str, str]
) -> None:
    right = [await asked(local.url, number) for number in range(4)]
    settings = SETTINGS | {"MOESAIC_DETERMINISTIC": "true"}
    workers, slots = flags
    apart = ("--experts", workers, "--slots-per-layer", slots)
    with running(tmp_path, *apart, settings=settings) as suite:
        moved, rounds = asyncio.Event(), 0

        async def again_and_again() -> None:
            nonlocal rounds
            last = False
            while not last:
                last = moved.is_set()
                got = await asyncio.gather(*(asked(suite.url, number) for number in range(4)))
                assert got == right
                rounds += 1

        async with asyncio.TaskGroup() as group:
            group.create_task(again_and_again())
            for _ in range(2):
                plan_file = tmp_path / "plan.json"
                plan = await planned(suite, plan_file)
                applied = await cli(suite, "placement", "apply", str(plan_file))
                assert applied["epoch"] > plan["base_epoch"]
            moved.set()

    assert rounds > 1
