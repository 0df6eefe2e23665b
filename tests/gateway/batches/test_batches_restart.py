"""A batch outlives the process that carries it out."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from moesaic.cli.machine.ports import hold_port, number_of
from moesaic.cluster.redis.bus import Bus
from moesaic.cluster.redis.child import start_redis
from moesaic.cluster.registry import registered
from moesaic.messages.registry import WorkerRecord
from moesaic.v1 import attention_pb2 as pb
from tests.waiting import until

pytestmark = pytest.mark.suite

NUM_REQUESTS, NUM_FIRST, NUM_AT_ONCE = 30, 10, 4


def start(model: Path, redis_url: str, port: int, files: Path) -> subprocess.Popen[str]:
    flags = {
        "--model": model,
        "--redis-url": redis_url,
        "--port": port,
        "--files-dir": files,
        "--batch-max-inflight": NUM_AT_ONCE,
    }
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MOESAIC_")}
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "moesaic.services.gateway",
            *(str(p) for flag in flags.items() for p in flag),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
async def test_a_batch_goes_on_without_losing_or_repeating_an_answer(
    model_directory: Path, tmp_path: Path, open_house, scripts, end: signal.Signals
) -> None:
    says, files = scripts.says("yes"), tmp_path / "files"

    async def few(submit: pb.Submit, emit: Any) -> None:
        if len(house.workers[0].submits) <= NUM_FIRST:
            await says(submit, emit)

    redis, url = start_redis(tmp_path)
    held = hold_port("127.0.0.1")
    port = number_of(held)
    gateway = start(model_directory, url, port, files)
    try:
        async with (
            open_house(few) as house,
            Bus.connect(url, "default") as bus,
            registered(bus, _record(house)),
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", verify=False) as client,
        ):
            await _until_it_listens(client)
            batch_id = await _submit(client)
            # Those that wait for an answer now can only be asked for once all before them are written.
            await house.until(
                lambda: (
                    len(house.workers[0].submits) == NUM_FIRST + NUM_AT_ONCE
                    and _written(files, batch_id) == NUM_FIRST
                )
            )
        gateway.send_signal(end)
        _, errors = await asyncio.to_thread(gateway.communicate)
    finally:
        gateway.kill()
        held.close()
        redis.terminate()
        redis.wait()

    async with open_house(says, files_dir=str(files)) as house:
        batch = await _completed(house.client, batch_id)
        output = await house.client.get(f"/v1/files/{batch['output_file_id']}/content")
        asked_again = len(house.workers[0].submits)

    assert gateway.returncode == (0 if end == signal.SIGTERM else -signal.SIGKILL)
    assert not errors
    results = [json.loads(line) for line in output.text.splitlines()]
    assert [result["custom_id"] for result in results] == [f"r{n}" for n in range(NUM_REQUESTS)]
    assert {result["response"]["status_code"] for result in results} == {200}
    assert batch["request_counts"] == {
        "total": NUM_REQUESTS,
        "completed": NUM_REQUESTS,
        "failed": 0,
    }
    assert asked_again == NUM_REQUESTS - NUM_FIRST


@pytest.mark.slow
async def test_gateways_that_are_killed_again_and_again_answer_everything_once(
    model_directory: Path, tmp_path: Path, open_house, scripts
) -> None:
    chance, files, says = random.Random(5), tmp_path / "files", scripts.says("yes")

    async def slowly(submit: pb.Submit, emit: Any) -> None:
        await asyncio.sleep(chance.random() / 2)
        await says(submit, emit)

    redis, url = start_redis(tmp_path)
    held = [hold_port("127.0.0.1") for _ in range(2)]
    ports = [number_of(each) for each in held]
    gateways = [start(model_directory, url, port, files) for port in ports]
    clients = [
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", verify=False) for port in ports
    ]
    try:
        async with (
            open_house(slowly) as house,
            Bus.connect(url, "default") as bus,
            registered(bus, _record(house)),
        ):
            for client in clients:
                await _until_it_listens(client)
            batch_ids = [await _submit(client) for client in clients * 3]
            for _ in range(6):
                await asyncio.sleep(chance.random())
                one = chance.randrange(2)
                gateways[one].kill()
                gateways[one].communicate()
                gateways[one] = start(model_directory, url, ports[one], files)
            await _until_it_listens(clients[0])
            outputs = []
            for batch_id in batch_ids:
                batch = await _completed(clients[0], batch_id)
                content = f"/v1/files/{batch['output_file_id']}/content"
                outputs.append((await clients[0].get(content)).text)
            num_files = len((await clients[0].get("/v1/files")).json()["data"])
    finally:
        for client in clients:
            await client.aclose()
        for each in held:
            each.close()
        for gateway in gateways:
            gateway.kill()
            gateway.communicate()
        redis.terminate()
        redis.wait()

    for output in outputs:
        ids = [json.loads(line)["custom_id"] for line in output.splitlines()]
        assert ids == [f"r{n}" for n in range(NUM_REQUESTS)]
    assert num_files == 2 * len(batch_ids)  # an input and an output each


def _record(house: Any) -> WorkerRecord:
    return WorkerRecord(
        worker_id="attention-1",
        generation=1,
        role="attention",
        state="ready",
        admin_address=house.workers[0].address,
        dispatch="local",
    )


async def _submit(client: httpx.AsyncClient) -> str:
    url = "/v1/completions"
    requests = [
        {"custom_id": f"r{n}", "method": "POST", "url": url, "body": {"prompt": "a"}}
        for n in range(NUM_REQUESTS)
    ]
    content = "\n".join(map(json.dumps, requests)).encode()
    uploaded = await client.post("/v1/files", files={"file": content}, data={"purpose": "batch"})
    body = {
        "input_file_id": uploaded.json()["id"],
        "endpoint": url,
        "completion_window": "24h",
    }
    return str((await client.post("/v1/batches", json=body)).json()["id"])


async def _completed(client: httpx.AsyncClient, batch_id: str) -> dict[str, Any]:
    async def completed() -> dict[str, Any] | None:
        batch = dict((await client.get(f"/v1/batches/{batch_id}")).json())
        assert batch["status"] in ("validating", "in_progress", "finalizing", "completed")
        return batch if batch["status"] == "completed" else None

    return await until(completed)


def _written(files: Path, batch_id: str) -> int:
    results = files / "tenant-default" / "batches" / batch_id / "results.jsonl"
    return results.read_bytes().count(b"\n") if results.exists() else 0


async def _until_it_listens(client: httpx.AsyncClient) -> None:
    async def listens() -> bool:
        with suppress(httpx.TransportError):
            return (await client.get("/livez")).status_code == 200
        return False

    await until(listens)
