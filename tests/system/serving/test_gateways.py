"""Two gateways before the same workers: both know what is cached and what the other has them do, and neither needs the
other."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from moesaic.v1.gateway_pb2 import GetRouterRequest, RoutedWorker
from moesaic.v1.gateway_pb2_grpc import GatewayServiceStub
from tests.suites import DEMO, Suite, log_entries
from tests.system.control import environment
from tests.system.shared_suites import PAIR, SharedSuites
from tests.waiting import HANG_S, eventually

TEXT = "The ship left the harbour early in the morning, while the town was still asleep. " * 6
LABELS = ["travel", "money", "weather", "food"]


@dataclass(frozen=True)
class Other:
    """A gateway beside that of a suite."""

    process: "subprocess.Popen[bytes]"
    url: str
    admin_address: str


@contextmanager
def gateway(suite: Suite, name: str) -> Iterator[Other]:
    """One more gateway, as an operator starts it; it finds the workers through Redis."""
    log = suite.directory / f"{name}.log"
    flags = ("--model", str(DEMO), "--port", "0", "--worker-id", name, "--host", "127.0.0.1")
    inside = ("--control-host", "127.0.0.1", "--advertise-host", "127.0.0.1", "--admin-port", "0")
    command = [sys.executable, "-m", "moesaic.cli", "serve", "gateway", *flags, *inside]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment(suite))

    def url() -> str | None:
        assert process.poll() is None, log.read_text()
        told = (e["address"] for e in log_entries(log) if e["event"] == "gateway.serving")
        return next((f"http://{address}" for address in told), None)

    def admin_address() -> str | None:
        services = json.loads(suite.cli("status", "--json").stdout)["services"]
        return next((each["admin_address"] for each in services if each["id"] == name), None)

    try:
        other = Other(process, eventually(url), eventually(admin_address))
        with httpx.Client(base_url=other.url, timeout=HANG_S) as client:
            eventually(lambda: client.get("/readyz").status_code == 200)
        yield other
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def suite(suites: SharedSuites) -> Suite:
    return suites.get(*PAIR)


@pytest.fixture(scope="module")
def second(suite: Suite) -> Iterator[Other]:
    with gateway(suite, "second") as other:
        yield other


def classify(url: str, text: str, **more: Any) -> Any:
    body = {"input": text, "labels": LABELS, "method": "sequence", **more}
    body["moesaic"] = {"provenance": True, **more.get("moesaic", {})}
    answer = httpx.post(f"{url}/v1/classify", json=body, timeout=HANG_S)
    assert answer.status_code == 200, answer.text
    return answer.json()


def routers(suite: Suite, second: Other) -> list[list[RoutedWorker]]:
    """Return the workers as each of both gateways knows them, sorted by name."""
    told = []
    for address in (suite.admin_address("gateway"), second.admin_address):
        with suite.blocking_channel(address) as channel:
            state = GatewayServiceStub(channel).GetRouter(GetRouterRequest(), timeout=HANG_S)
        told.append(sorted(state.workers, key=lambda worker: worker.worker_id))
    return told


def test_what_one_gateway_had_computed_the_other_finds(suite: Suite, second: Other) -> None:
    texts = [f"Chapter {n}. {TEXT}" for n in range(4)]
    first = [classify(suite.url, text) for text in texts]
    again = [classify(second.url, text) for text in texts]

    for before, after in zip(first, again, strict=True):
        assert after["data"] == before["data"]
        assert after["moesaic"]["workers"] == before["moesaic"]["workers"]
        assert after["moesaic"]["cached_tokens"] > 100

    def know_the_same() -> bool:
        one, two = ([w.committed_blocks for w in told] for told in routers(suite, second))
        return one == two and sum(one) > 20

    eventually(know_the_same)


def test_a_gateway_knows_what_the_other_has_a_worker_do(suite: Suite, second: Other) -> None:
    """A long answer by one gateway; the other sees it, and sends its own work elsewhere."""
    long = {"prompt": "In the second year of the war", "max_tokens": 1500, "ignore_eos": True}
    with (
        httpx.Client(base_url=suite.url, timeout=HANG_S) as client,
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


@pytest.mark.slow
def test_a_killed_worker_is_forgotten_and_found_again_by_both(suite: Suite, second: Other) -> None:
    with suite.unsupervised():
        suite.signal("attention-0", signal.SIGKILL)
        eventually(lambda: [len(told) for told in routers(suite, second)] == [1, 1])
        answers = [classify(url, TEXT) for url in (suite.url, second.url)]

    def both_back() -> bool:
        told = routers(suite, second)
        return all(len(t) == 2 and all(w.accepting and w.caches for w in t) for t in told)

    def idle() -> bool:
        told = routers(suite, second)
        return not any(w.remaining_flops or w.num_requests for each in told for w in each)

    eventually(both_back)
    assert answers[0]["data"] == answers[1]["data"]
    eventually(idle)


def write_much(url: str, prompt: str) -> None:
    """Ask for what takes seconds."""
    body = {"prompt": prompt, "max_tokens": 1000, "ignore_eos": True}
    httpx.post(f"{url}/v1/completions", json=body, timeout=HANG_S)


def test_a_killed_gateway_costs_the_other_nothing(suite: Suite) -> None:
    texts = [f"Part {n}. {TEXT}" for n in range(24)]
    expected = [classify(suite.url, text)["data"] for text in texts]

    def ask(number: int) -> Any:
        return classify(suite.url, texts[number], cache_salt="again")["data"]

    with gateway(suite, "third") as other, ThreadPoolExecutor(16) as pool:
        doomed = [pool.submit(write_much, other.url, f"Lost {n}. {TEXT}") for n in range(8)]
        asked = [pool.submit(ask, number) for number in range(len(texts))]
        eventually(lambda: any(w.num_requests for w in routers(suite, other)[1]))
        os.kill(other.process.pid, signal.SIGKILL)
        answers = [future.result() for future in asked]
        for future in doomed:
            assert isinstance(future.exception(), httpx.TransportError)

    def idle() -> bool:
        with suite.blocking_channel(suite.admin_address("gateway")) as channel:
            state = GatewayServiceStub(channel).GetRouter(GetRouterRequest(), timeout=HANG_S)
        return not any(w.others_flops or w.remaining_flops for w in state.workers)

    assert answers == expected
    eventually(idle)  # what the dead gateway wanted is not computed on
