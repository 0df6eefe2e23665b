"""The gateway as a process of its own, with a real registry."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from moesaic.cli.machine.ports import hold_port, number_of
from moesaic.cluster.redis.bus import Bus
from moesaic.cluster.redis.child import start_redis
from moesaic.cluster.registry import registered
from moesaic.messages.registry import WorkerRecord
from tests.waiting import HANG_S, until

pytestmark = pytest.mark.suite

BLOCK_TORCH = "import sys; sys.modules['torch'] = None; "


def start(*arguments: str) -> subprocess.Popen[str]:
    code = BLOCK_TORCH + "from moesaic.services.gateway.__main__ import main; main()"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MOESAIC_")}
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


@pytest.mark.parametrize(
    ("arguments", "named", "status"),
    [
        (["--host", "0.0.0.0", "--advertise-host", "127.0.0.1"], "--no-auth", 2),
        (["--port", "0", "--allowed-origins", "*"], "--allowed-origins", 2),
        (["--port", "{taken}"], "--port", 3),  # it may be free the next time
        (["--port", "0", "--api-keys-file", "nowhere.json"], "--api-keys-file", 2),
        (["--redis-url", "http://nowhere", "--port", "0"], "--redis-url", 2),
    ],
)
def test_what_keeps_it_from_starting_is_said_in_one_line(
    model_directory: Path, arguments, named, status
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        arguments = [argument.format(taken=port) for argument in arguments]
        process = start("--model", str(model_directory), *arguments)
        _, errors = process.communicate()

    assert process.returncode == status
    assert named in errors
    assert errors.startswith("error: ")
    assert len(errors.splitlines()) == 1


async def test_it_serves_from_the_registry_and_finishes_what_runs_on_sigterm(
    model_directory: Path, tmp_path: Path, open_house, scripts
) -> None:
    redis, url = start_redis(tmp_path)
    held = hold_port("127.0.0.1")
    port = str(number_of(held))
    gateway = start(
        "--model", str(model_directory), "--redis-url", url, "--port", port, "--worker-id", "gw"
    )
    text = "this is a story about a house"
    try:
        async with (
            open_house(scripts.says(text, gap_s=0.05)) as house,
            Bus.connect(url, "default") as bus,
        ):
            record = WorkerRecord(
                worker_id="attention-1",
                generation=1,
                role="attention",
                state="ready",
                admin_address=house.workers[0].address,
                dispatch="local",
            )
            async with (
                registered(bus, record),
                httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", verify=False) as client,
            ):
                await _until_ready(client)
                asking = asyncio.ensure_future(
                    client.post(
                        "/v1/completions", json={"prompt": "a", "stream": True}, timeout=HANG_S
                    )
                )
                await house.until(lambda: bool(house.workers[0].submits))
                gateway.send_signal(signal.SIGTERM)
                response = await asking
        output, errors = await asyncio.to_thread(gateway.communicate)
    finally:
        gateway.kill()
        held.close()
        redis.terminate()
        redis.wait()

    assert gateway.returncode == 0, errors
    assert not errors
    data = [line for line in response.text.split("\n\n") if line]
    assert "".join(json.loads(item[6:])["choices"][0]["text"] for item in data[:-1]) == text
    assert data[-1] == "data: [DONE]"
    events = [json.loads(line)["event"] for line in output.splitlines()]
    assert "gateway.serving" in events
    assert events.count("request.finished") == 1  # probes are no news


async def _until_ready(client: httpx.AsyncClient) -> None:
    async def is_ready() -> bool:
        with suppress(httpx.TransportError):
            return (await client.get("/readyz")).status_code == 200
        return False

    await until(is_ready)
