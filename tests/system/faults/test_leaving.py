"""Expert workers leave and come back under load, and no step is run twice for it."""

import asyncio
import signal
from typing import Any

import httpx
import pytest

from moesaic.v1 import admin_pb2 as pb
from moesaic.v1 import admin_pb2_grpc
from tests.system.control import Watch, events
from tests.waiting import HANG_S, until

PROMPTS = 8
ATTENTION = ("attention-0", "attention-1")


async def answer(client: httpx.AsyncClient, number: int) -> str:
    body = {
        "model": "demo",
        "prompt": f"The {number}th man went to the town of London and",
        "max_tokens": 32,
        "temperature": 0,
        "ignore_eos": True,
    }
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


async def num_retries(suite: Any, name: str) -> float:
    async with suite.channel(name) as connection:
        stub = admin_pb2_grpc.AdminServiceStub(connection)
        stats = await stub.GetStats(pb.GetStatsRequest(), timeout=HANG_S)
    return float(stats.values["moesaic_step_retries_total"])


@pytest.mark.slow
async def test_workers_that_drain_or_are_terminated_cost_no_step(spare: Any) -> None:
    def have_all_linked() -> bool:
        peers = [
            {e["peer"] for e in events(spare, name, "expert_worker.linked")} for name in ATTENTION
        ]
        return all(linked == {"expert-0", "expert-1", "expert-2"} for linked in peers)

    await until(have_all_linked)
    watches = {name: Watch(spare, name) for name in (*ATTENTION, "expert-0", "expert-1")}

    def count(name: str, event: str, **fields: object) -> int:
        return len(watches[name].entries(event, **fields))

    def all_linked(peer: str) -> bool:
        return all(count(name, "expert_worker.linked", peer=peer) == 1 for name in ATTENTION)

    async with httpx.AsyncClient(base_url=spare.url, timeout=HANG_S) as client:
        expected = await asyncio.gather(*(answer(client, n) for n in range(PROMPTS)))
        before = [await num_retries(spare, name) for name in ATTENTION]
        done = asyncio.Event()

        async def ask_again_and_again(number: int) -> None:
            while not done.is_set():
                assert await answer(client, number) == expected[number]

        async with asyncio.TaskGroup() as asking:
            for number in range(PROMPTS):
                asking.create_task(ask_again_and_again(number))

            async with spare.channel("expert-0") as connection:
                expert_0 = admin_pb2_grpc.AdminServiceStub(connection)
                await expert_0.Drain(pb.DrainRequest(), timeout=HANG_S)
                spare.signal("expert-1", signal.SIGTERM)  # at once: steps meet both departures
                # Of an expert worker that came late, it may have seen another one leave: that one pulled experts.
                await until(lambda: all(count("expert-0", "peer.left", peer=a) for a in ATTENTION))
                await until(lambda: all_linked("expert-1"))  # it was started again

                await expert_0.Undrain(pb.UndrainRequest(), timeout=HANG_S)
                await until(lambda: all_linked("expert-0"))
            done.set()

        assert [await num_retries(spare, name) for name in ATTENTION] == before
    for name in ATTENTION:
        assert count(name, "expert_worker.failed") == 0
    assert count("expert-1", "worker.draining", peers=list(ATTENTION)) == 1
    assert count("expert-1", "grace.over") == 0
