"""The network that benchmarks measure on: bytes take the time that a link's rate and delay say, and no less."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from benchmarks.common.links import LinkedHosts, NoLinks, linked_hosts
from moesaic.cli.machine.links.cables import BURST_BYTES
from tests.waiting import HANG_S

MBIT, DELAY_MS, SENT_BYTES = 20, 5.0, 200_000
SERVE = f"""
import socket
server = socket.create_server(("", 0))
print(server.getsockname()[1], flush=True)
while True:
    caller = server.accept()[0]
    caller.recv(1)
    caller.sendall(bytes({SENT_BYTES}))
"""
# Prints the seconds from asking until the last byte. Nothing can make them fewer than the link's, however slow it is.
ASK = f"""
import socket, sys, time
server = socket.create_connection((sys.argv[1], int(sys.argv[2])))
asked, received = time.perf_counter(), 0
server.sendall(b".")
while received < {SENT_BYTES}:
    received += len(server.recv(1 << 16))
print(time.perf_counter() - asked)
"""


@pytest.fixture(params=[0.0, DELAY_MS], ids=["rate alone", "rate and delay"])
def hosts(request: pytest.FixtureRequest) -> Iterator[LinkedHosts]:
    try:
        with linked_hosts(["near", "far"], MBIT, request.param) as made:
            yield made
    except NoLinks as error:
        pytest.skip(f"no links here: {error}")


def answer_s(hosts: LinkedHosts) -> float:
    """Seconds from asking the far host until its last byte."""
    serve = hosts.command("far", [sys.executable, "-c", SERVE])
    with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as serving:
        assert serving.stdout is not None
        target = (hosts.addresses["far"], serving.stdout.readline().strip())
        command = hosts.command("near", [sys.executable, "-c", ASK, *target])
        done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
        serving.kill()
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


def buckets(hosts: LinkedHosts) -> list[str]:
    """The rates that the kernel holds the hosts' ends of their cables to."""
    shown = [
        subprocess.run(
            hosts.command(host, ["tc", "qdisc", "show"]), capture_output=True, text=True
        ).stdout.split()
        for host in hosts.addresses
    ]
    return [words[at + 1] for words in shown for at, word in enumerate(words) if word == "rate"]


def test_bytes_take_at_least_what_rate_and_delay_say(hosts: LinkedHosts) -> None:
    there_and_back_s = 2 * hosts.network.delay_us / 1e6
    sending_s = 8 * (SENT_BYTES - BURST_BYTES) / (MBIT * 1e6)

    assert answer_s(hosts) >= there_and_back_s + sending_s


def test_links_are_shaped_anew_for_whoever_finds_them(hosts: LinkedHosts) -> None:
    found = LinkedHosts.find(hosts.told())

    found.shape(100)
    assert buckets(hosts) == ["100Mbit"] * 2

    found.shape(0)
    assert buckets(hosts) == []
    assert answer_s(hosts) >= 2 * hosts.network.delay_us / 1e6
