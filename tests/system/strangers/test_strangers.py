"""Strangers at every listener of a suite: it goes on serving, ends no process, and keeps nothing of theirs.

``make fuzz`` does the same for long, with seeds that it prints.
"""

import json
import os
import random
import socket
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from typing import Any

import psutil
import pytest

from tests.suites import Suite, running
from tests.system.strangers.messages import OF_KIND, spoilt
from tests.waiting import eventually

SECONDS = float(os.environ.get("FUZZ_SECONDS", "300"))
A_ROUND = 60  # messages to each listener
AT_A_TIME = 20  # connections
ROOM = 40  # descriptors that a process may open meanwhile by itself
GLOO = "ranks"  # it keeps the connections of strangers, as SECURITY.md says
LISTEN_S = 0.02  # to what a listener answers


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suite]:
    """A suite with a listener of each kind that one machine has."""
    directory = tmp_path_factory.mktemp("strangers")
    with running(directory, "--tensor-parallel", "2", settings={"UCX_LOG_LEVEL": "error"}) as suite:
        yield suite


def listeners(suite: Suite) -> list[tuple[str, str]]:
    findings = json.loads(suite.cli("doctor", "--json").stdout)
    [found] = [each for each in findings if each["name"] == "listeners"]
    return sorted((each["kind"], each["address"]) for each in found["listeners"])


def connected(address: str) -> socket.socket:
    if address.startswith("/"):
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(address)
    else:
        host, _, port = address.rpartition(":")
        sock = socket.create_connection((host.strip("[]"), int(port)))
    sock.settimeout(LISTEN_S)
    return sock


def speak(address: str, message: bytes, draw: random.Random) -> socket.socket | None:
    """Send a message; give the connection if it stays open."""
    sock = connected(address)
    with suppress(OSError):
        sock.sendall(message)
        if draw.random() < 0.3:
            sock.shutdown(socket.SHUT_WR)
        if draw.random() < 0.3:
            sock.recv(1 << 16)
    if draw.random() < 0.5:
        return sock
    sock.close()
    return None


def play(suite: Suite, found: list[tuple[str, str]], seed: int) -> None:
    """Send one round of messages to all listeners."""
    draw = random.Random(seed)
    kept: deque[socket.socket] = deque()
    earlier: dict[str, list[bytes]] = {kind: [] for kind in OF_KIND}
    try:
        for kind, address in found:
            for _ in range(A_ROUND):
                message = OF_KIND[kind](draw)
                sock = speak(address, spoilt(draw, message, earlier[kind]), draw)
                earlier[kind] = [*earlier[kind][-8:], message]
                if sock is not None:
                    kept.append(sock)
                while len(kept) > AT_A_TIME:
                    kept.popleft().close()
    finally:
        for sock in kept:
            sock.close()


def pids(suite: Suite) -> dict[str, list[int]]:
    """Processes by name; ranks are their worker's. Others that it starts now and then do not count."""
    found = {}
    for process in suite.state()["processes"]:
        found[process["name"]] = [process["pid"]]
        for child in psutil.Process(process["pid"]).children():
            with suppress(psutil.Error):
                if any("--tensor-parallel-rank" in each for each in child.cmdline()):
                    found[process["name"]].append(child.pid)
    return found


def num_descriptors(suite: Suite) -> dict[str, int]:
    return {
        name: sum(psutil.Process(pid).num_fds() for pid in own) for name, own in pids(suite).items()
    }


def faults(suite: Suite) -> list[Any]:
    """What the logs have as errors, besides what the servers say of calls that they could not read."""
    return [
        entry
        for process in suite.state()["processes"]
        if process["role"] != "redis"
        for entry in suite.log(process["name"])
        if entry.get("level") == "error" or "exception" in entry
        if not str(entry.get("logger", "")).startswith(("grpc", "uvicorn"))
    ]


def answer(suite: Suite) -> str:
    body = {"model": "demo", "prompt": "The quick brown fox", "max_tokens": 8, "temperature": 0}
    with suite.client() as client:
        done = client.post("/v1/completions", json=body)
    assert done.status_code == 200, done.text
    return str(done.json()["choices"][0]["text"])


def check(suite: Suite, seeds: Iterator[int], until: float) -> None:
    found = listeners(suite)
    assert {kind for kind, _ in found} == OF_KIND.keys() - {"meeting of ranks"}
    expected, before, opened = answer(suite), pids(suite), num_descriptors(suite)
    ours = [(kind, address) for kind, address in found if kind != GLOO]
    for seed in seeds:
        play(suite, ours, seed)

        assert answer(suite) == expected, f"seed {seed}"
        assert pids(suite) == before, f"seed {seed}: a process has ended"
        assert faults(suite) == [], f"seed {seed}"
        if time.monotonic() > until:
            break
    assert listeners(suite) == found

    def given_back() -> bool:
        now = num_descriptors(suite)
        return all(now[name] <= opened[name] + ROOM for name in opened)

    eventually(given_back)
    play(suite, [(kind, address) for kind, address in found if kind == GLOO], 0)
    assert answer(suite) == expected
    assert pids(suite) == before


def test_a_suite_outlives_strangers_at_all_its_listeners(suite: Suite) -> None:
    check(suite, iter(range(2)), float("inf"))


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_a_suite_outlives_strangers_for_long(suite: Suite) -> None:
    first = random.SystemRandom().randrange(1 << 32)
    print(f"\nseeds from {first} on, for {SECONDS:.0f} s")
    check(suite, count(first), time.monotonic() + SECONDS)


def test_the_messages_of_a_seed_are_the_same_each_time() -> None:
    for kind, make in OF_KIND.items():
        if kind not in ("gRPC", "meeting of ranks", "tensors"):  # these have nonces
            assert make(random.Random(7)) == make(random.Random(7))
