"""Two gateways before the same workers: both know what is cached and what the other has them do, and neither needs the
other."""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from moesaic.cluster.redis.child import start_redis
from moesaic.v1.gateway_pb2 import GetRouterRequest, RoutedWorker
from moesaic.v1.gateway_pb2_grpc import GatewayServiceStub
from tests.suites import DEMO, Suite, eventually, running

TEXT = "The ship left the harbour early in the morning, while the town was still asleep. " * 6
LABELS = ["travel", "money", "weather", "food"]


@dataclass(frozen=True)
class Other:
    """A gateway beside that of a suite."""

    process: "subprocess.Popen[bytes]"
    url: str
    admin_address: str


@contextmanager
def gateway(directory: Path, name: str) -> Iterator[Other]:
    """One more gateway, as an operator starts it; it finds the workers through Redis."""
    log = directory / f"{name}.log"
    flags = ("--model", str(DEMO), "--port", "0", "--worker-id", name, "--host", "127.0.0.1")
    inside = ("--control-host", "127.0.0.1", "--advertise-host", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ports = ("--admin-port", str(port))
    command = [sys.executable, "-m", "moesaic.cli", "serve", "gateway", *flags, *inside, *ports]
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)

    def lines() -> list[dict[str, Any]]:
        return [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]

    def serving() -> str | None:
        assert process.poll() is None, log.read_text()
        told = (line["address"] for line in lines() if line["event"] == "gateway.serving")
        return next(told, None)

    try:
        eventually(serving)
        url = f"http://{serving()}"
        eventually(lambda: httpx.get(f"{url}/readyz", timeout=5).status_code == 200)
        yield Other(process, url, f"127.0.0.1:{port}")
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suite]:
    directory = tmp_path_factory.mktemp("gateways")
    redis, url = start_redis(directory / "redis")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOESAIC_REDIS_URL", url)
        patch.setenv("MOESAIC_SECRET", secrets.token_hex(16))
        try:
            with running(directory, "--topology", "local", "--attention", "2") as suite:
                yield suite
        finally:
            redis.terminate()
            redis.wait()


@pytest.fixture(scope="module")
def second(suite: Suite) -> Iterator[Other]:
    with gateway(suite.directory, "second") as other:
        yield other


def classify(url: str, text: str, **more: Any) -> Any:
    body = {"input": text, "labels": LABELS, "method": "sequence", **more}
    body["moesaic"] = {"provenance": True, **more.get("moesaic", {})}
    answer = httpx.post(f"{url}/v1/classify", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def routers(suite: Suite, second: Other) -> list[list[RoutedWorker]]:
    """Return the workers as each of both gateways knows them, sorted by name."""
    [first] = [p["admin_address"] for p in suite.state()["processes"] if p["name"] == "gateway"]
    told = []
    for address in (first, second.admin_address):
        with suite.blocking_channel(address) as channel:
            state = GatewayServiceStub(channel).GetRouter(GetRouterRequest(), timeout=10)
        told.append(sorted(state.workers, key=lambda worker: worker.worker_id))
    return told


@pytest.mark.timeout(240)
def test_what_one_gateway_had_computed_the_other_finds(suite: Suite, second: Other) -> None:
    texts = [f"Chapter {n}. {TEXT}" for n in range(4)]
    first = [classify(suite.url, text) for text in texts]
    again = [classify(second.url, text) for text in texts]

    for before, after in zip(first, again, strict=True):
        assert after["data"] == before["data"]
        assert after["moesaic"]["workers"] == before["moesaic"]["workers"]
        assert after["moesaic"]["cached_tokens"] > 100
    one, two = routers(suite, second)
    assert [w.committed_blocks for w in one] == [w.committed_blocks for w in two]
    assert sum(w.committed_blocks for w in one) > 20


@pytest.mark.timeout(240)
def test_a_gateway_knows_what_the_other_has_a_worker_do(suite: Suite, second: Other) -> None:
    """A long answer by one gateway; the other sees it, and sends its own work elsewhere."""
    long = {"prompt": "In the second year of the war", "max_tokens": 1500, "ignore_eos": True}
    with (
        httpx.Client(base_url=suite.url, timeout=120) as client,
        client.stream("POST", "/v1/completions", json={**long, "stream": True}) as stream,
    ):
        chunks = stream.iter_lines()
        next(chunks)
        eventually(lambda: any(worker.others_flops for worker in routers(suite, second)[1]))
        mine, theirs = routers(suite, second)
        [busy] = [worker.worker_id for worker in mine if worker.num_requests]
        assert [worker.worker_id for worker in theirs if worker.others_flops] == [busy]
        assert not any(worker.others_flops for worker in mine)
        used = [
            classify(second.url, f"Something new, number {n}.", cache_salt=f"salt {n}")
            for n in range(4)
        ]
    assert all(answer["moesaic"]["workers"] != [busy] for answer in used)
    eventually(lambda: not any(w.others_flops for told in routers(suite, second) for w in told))


@pytest.mark.timeout(240)
def test_a_killed_worker_is_forgotten_and_found_again_by_both(suite: Suite, second: Other) -> None:
    suite.signal("attention-0", signal.SIGKILL)
    eventually(lambda: [len(told) for told in routers(suite, second)] == [1, 1])
    answers = [classify(url, TEXT) for url in (suite.url, second.url)]

    def both_back() -> bool:
        told = routers(suite, second)
        return all(len(t) == 2 and all(w.accepting and w.caches for w in t) for t in told)

    eventually(both_back)
    assert answers[0]["data"] == answers[1]["data"]
    for told in routers(suite, second):
        assert not any(w.remaining_flops or w.num_requests for w in told)


@pytest.mark.timeout(240)
def write_much(url: str, prompt: str) -> None:
    """Ask for what takes seconds."""
    body = {"prompt": prompt, "max_tokens": 1000, "ignore_eos": True}
    httpx.post(f"{url}/v1/completions", json=body, timeout=120)


def test_a_killed_gateway_costs_the_other_nothing(suite: Suite) -> None:
    texts = [f"Part {n}. {TEXT}" for n in range(24)]
    expected = [classify(suite.url, text)["data"] for text in texts]

    def ask(number: int) -> Any:
        return classify(suite.url, texts[number], cache_salt="again")["data"]

    with gateway(suite.directory, "third") as other, ThreadPoolExecutor(16) as pool:
        doomed = [pool.submit(write_much, other.url, f"Lost {n}. {TEXT}") for n in range(8)]
        asked = [pool.submit(ask, number) for number in range(len(texts))]
        eventually(lambda: any(w.num_requests for w in routers(suite, other)[1]))
        os.kill(other.process.pid, signal.SIGKILL)
        answers = [future.result() for future in asked]
        for future in doomed:
            assert isinstance(future.exception(), httpx.TransportError)
        processes = suite.state()["processes"]
        one = next(p["admin_address"] for p in processes if p["name"] == "gateway")

    def idle() -> bool:
        with suite.blocking_channel(one) as channel:
            state = GatewayServiceStub(channel).GetRouter(GetRouterRequest(), timeout=10)
        return not any(w.others_flops or w.remaining_flops for w in state.workers)

    assert answers == expected
    eventually(idle)  # what the dead gateway wanted is not computed on
