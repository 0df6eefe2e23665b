"""The network that benchmarks measure on: hosts of its own, with links as slow as is asked for."""

import subprocess
import sys

import pytest

from benchmarks.prefill.shaped_hosts import NotPermitted, shaped_hosts
from tests.waiting import HANG_S

SERVE = """
import socket
server = socket.create_server(("", 0))
print(server.getsockname()[1], flush=True)
server.accept()[0].sendall(b"hello")
"""
ASK = "import socket, sys; print(socket.create_connection((sys.argv[1], int(sys.argv[2])), 10).recv(99).decode())"


def names(*command: str) -> str:
    return subprocess.run(["ip", *command], capture_output=True, text=True, check=True).stdout


def test_hosts_reach_each_other_over_shaped_links_and_leave_nothing_behind() -> None:
    try:
        with shaped_hosts(2) as network:
            network.shape(500)
            network.shape(100)  # links can be shaped anew
            near, far = network.hosts
            qdisc = subprocess.run(
                near.command(["tc", "qdisc", "show", "dev", "uplink"]), capture_output=True
            )
            serving = subprocess.Popen(
                far.command([sys.executable, "-c", SERVE]), stdout=subprocess.PIPE, text=True
            )
            assert serving.stdout is not None
            asked = near.command(
                [sys.executable, "-c", ASK, far.address, serving.stdout.readline().strip()]
            )
            answer = subprocess.run(
                asked, capture_output=True, text=True, timeout=HANG_S, check=False
            )
            serving.kill()
            serving.communicate()
    except NotPermitted as error:
        pytest.skip(f"no network namespaces here: {error}")

    assert answer.stdout == "hello\n", answer.stderr
    assert b"rate 100Mbit" in qdisc.stdout
    assert near.name not in names("netns", "list")
    assert near.cable not in names("link")
