"""Real services on nodes of different names: rows travel in two phases, and answers stay the same."""

import asyncio
import json
import secrets
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from moesaic.cluster.redis.child import start_redis
from moesaic.v1 import admin_pb2 as pb
from moesaic.v1 import admin_pb2_grpc
from tests.suites import DEMO, MOESAIC, Suite, running

PROMPTS = [f"The {number}th man went to the town of London and" for number in range(8)]
GATHERED = ("attention-a0", "attention-a1")  # on a node of their own


@pytest.fixture
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Suite]:
    """Two expert workers on one node, two attention workers on another, and one that will not serve."""
    redis, url = start_redis(tmp_path / "redis")
    monkeypatch.setenv("REDIS_URL", url)
    monkeypatch.setenv("MOESAIC_SECRET", secrets.token_hex(16))
    try:
        with running(tmp_path) as suite, attention(tmp_path):
            yield suite
    finally:
        redis.terminate()
        redis.wait()


@contextmanager
def attention(directory: Path) -> Iterator[None]:
    """Two more attention workers, not on the suite's node."""
    flags = ["--model", str(DEMO), "--node", "a", "--exchange", "relay"]
    processes = []
    for name in GATHERED:
        with (directory / f"{name}.log").open("w") as log:
            command = [str(MOESAIC), "serve", "attention", "--worker-id", name, *flags]
            if name == GATHERED[0]:  # the other one has a single batch of every step
                command += ["--micro-batches", "2"]
            processes.append(subprocess.Popen(command, stdout=log, stderr=log, cwd=directory))
    try:
        yield
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(60)


def events(log: Path, event: str) -> list[dict[str, Any]]:
    lines = [line for line in log.read_text(encoding="utf-8").splitlines() if line[-1:] == "}"]
    return [entry for entry in map(json.loads, lines) if entry["event"] == event]


async def answer(client: httpx.AsyncClient, prompt: str) -> str:
    body = {
        "model": "demo",
        "prompt": prompt,
        "max_tokens": 24,
        "temperature": 0,
        "ignore_eos": True,
    }
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


@pytest.mark.timeout(240)
async def test_answers_are_the_same_and_a_killed_relay_costs_none(
    apart: Suite, local: Suite
) -> None:
    logs = [apart.directory / f"{name}.log" for name in GATHERED]
    async with httpx.AsyncClient(base_url=local.url, timeout=60) as client:
        expected = await asyncio.gather(*(answer(client, prompt) for prompt in PROMPTS))
    while not all(events(log, "worker.ready") and events(log, "route.switched") for log in logs):
        await asyncio.sleep(0.1)
    async with apart.channel("attention-0") as connection:
        stub = admin_pb2_grpc.AdminServiceStub(connection)
        await stub.Drain(pb.DrainRequest(), timeout=10)

    async with httpx.AsyncClient(base_url=apart.url, timeout=120) as client:
        assert await asyncio.gather(*(answer(client, p) for p in PROMPTS)) == expected
        for name in ("expert-0", "expert-1"):  # each has relayed to the other
            assert any(e["event"] == "neighbour.linked" for e in apart.log(name))
        assert any(events(log, "neighbour.linked") for log in logs)

        asking = asyncio.gather(*(answer(client, p) for p in PROMPTS))
        await asyncio.sleep(0.3)
        apart.signal("expert-1", signal.SIGKILL)
        assert await asking == expected
