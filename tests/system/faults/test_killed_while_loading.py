"""A worker that dies in the middle of its load is started again, and the others load nothing twice."""

import asyncio
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import grpc
import httpx
import pytest

from benchmarks.memory.checkpoint import write_checkpoint
from moesaic.v1 import admin_pb2, admin_pb2_grpc
from tests.suites import Suite, running
from tests.system.control import paused
from tests.waiting import HANG_S, until

NUM_EXPERTS, NUM_LAYERS = 128, 2
# 200 MB that are quantised while they are loaded: long enough to be met in its middle.
SHAPE = {"vocab_size": 8192, "hidden_size": 512, "num_hidden_layers": NUM_LAYERS}
FLAGS = ("--topology", "disaggregated", "--experts", "2", "--quantization", "int4")
MIDDLE = (0.1, 0.9)  # parts of the bytes
BODY = {"prompt": [3, 1, 4, 1, 5], "max_tokens": 8, "ignore_eos": True}


@pytest.mark.slow
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
            answer = httpx.post(f"{suite.url}/v1/completions", json=BODY, timeout=HANG_S).json()
    assert answer["usage"]["completion_tokens"] == BODY["max_tokens"]


async def killed_in_the_middle(suite: Suite) -> int:
    """Wait until both workers of a suite that is being started load, and kill one.

    Returns:
        The process that it was.
    """
    await until(lambda: loads(suite, "expert-1"))
    with paused(suite, "expert-1"):  # it is in the middle of its own, however slow this process is
        await until(lambda: loads(suite, "expert-0"))
        pid = suite.pid("expert-0")
        suite.signal("expert-0", signal.SIGKILL)
    return pid


async def loads(suite: Suite, worker: str) -> bool:
    """Tell whether a worker has begun to load, and has not ended."""
    with suppress(OSError, ValueError, grpc.aio.AioRpcError):  # none of it is there yet
        addresses = {p["name"]: p["admin_address"] for p in suite.state()["processes"]}
        if address := addresses.get(worker):
            return MIDDLE[0] < await part_loaded(suite, address) < MIDDLE[1]
    return False


async def part_loaded(suite: Suite, address: str) -> float:
    """Return the part of its bytes that a worker has loaded; 0: it has not begun."""
    async with suite.channel_to(address) as connection:
        stub = admin_pb2_grpc.AdminServiceStub(connection)
        info = await stub.GetInfo(admin_pb2.GetInfoRequest(), timeout=HANG_S)
    return float(info.loading.done_bytes / max(1, info.loading.total_bytes))
