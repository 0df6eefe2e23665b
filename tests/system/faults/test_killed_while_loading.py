"""A worker that dies in the middle of its load is started again, and the others load nothing twice."""

import asyncio
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from benchmarks.memory.checkpoint import write_checkpoint
from moesaic.v1 import admin_pb2, admin_pb2_grpc
from tests.suites import Suite, running

NUM_EXPERTS, NUM_LAYERS = 128, 4
# 400 MB that are quantised while they are loaded: long enough to be met in its middle.
SHAPE = {"vocab_size": 8192, "hidden_size": 512, "num_hidden_layers": NUM_LAYERS}
FLAGS = ("--topology", "disaggregated", "--experts", "2", "--quantization", "int4")
MIDDLE = (0.1, 0.5)  # parts of the bytes
CALL_S, MEETS_WITHIN_S = 5, 120
BODY = {"prompt": [3, 1, 4, 1, 5], "max_tokens": 8, "ignore_eos": True}


@pytest.mark.timeout(240)
def test_others_keep_what_they_have_loaded(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    write_checkpoint(model, **SHAPE)
    with ThreadPoolExecutor(1) as threads:
        killing = threads.submit(asyncio.run, killed_in_the_middle(Suite(tmp_path, "")))
        with running(tmp_path, "--model", str(model), *FLAGS) as suite:
            assert suite.pid("expert-0") != killing.result(), "it was not started again"
            prepared = [e for e in suite.log("expert-1") if e["event"] == "placement.prepared"]
            again = next(each for each in prepared if each["kept"])
            assert again["loaded"] + again["kept"] == NUM_EXPERTS * NUM_LAYERS / 2
            assert sum(each["loaded"] for each in prepared) < NUM_EXPERTS * NUM_LAYERS / 2
            answer = httpx.post(f"{suite.url}/v1/completions", json=BODY, timeout=60).json()
    assert answer["usage"]["completion_tokens"] == BODY["max_tokens"]


async def killed_in_the_middle(suite: Suite) -> int:
    """Wait until both workers of a suite that is being started load, and kill one.

    Returns:
        The process that it was.
    """
    async with asyncio.timeout(MEETS_WITHIN_S):
        while True:
            with suppress(OSError, ValueError, grpc.aio.AioRpcError):
                workers = workers_of(suite)
                parts = [await part_loaded(suite, each["admin_address"]) for each in workers]
                if len(parts) == 2 and all(MIDDLE[0] < part < MIDDLE[1] for part in parts):
                    pid = suite.pid("expert-0")
                    suite.signal("expert-0", signal.SIGKILL)
                    return pid
            await asyncio.sleep(0.01)


def workers_of(suite: Suite) -> list[dict[str, Any]]:
    """List its expert workers that can be called."""
    processes = suite.state()["processes"]
    return [p for p in processes if p["role"] == "expert" and p.get("admin_address")]


async def part_loaded(suite: Suite, address: str) -> float:
    """Return the part of its bytes that a worker has loaded; 0: it has not begun."""
    async with suite.channel_to(address) as connection:
        stub = admin_pb2_grpc.AdminServiceStub(connection)
        info = await stub.GetInfo(admin_pb2.GetInfoRequest(), timeout=CALL_S)
    return float(info.loading.done_bytes / max(1, info.loading.total_bytes))
