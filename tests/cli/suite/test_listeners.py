"""Listeners of processes, and the table that tells what they are."""

import os
import socket
from pathlib import Path

import pytest

from moesaic.cli.checks.listeners import KINDS, UNKNOWN, listeners_of
from moesaic.cli.checks.machine_checks import check_listeners
from moesaic.cli.machine.sockets import OpenSocket, open_sockets
from moesaic.cli.machine.state import SuiteState, process_start_time
from tests.suites import ROOT


@pytest.fixture
def suite() -> SuiteState:
    """A suite that consists of this process."""
    return SuiteState(
        pid=os.getpid(),
        start_time=process_start_time(os.getpid()) or 0,
        state="ready",
        url="http://127.0.0.1:8000",
        topology="local",
        model="models/demo",
        processes=[],
    )


@pytest.mark.parametrize(
    ("family", "host", "loopback"),
    [
        (socket.AF_INET, "127.0.0.1", True),
        (socket.AF_INET, "0.0.0.0", False),
        (socket.AF_INET6, "::1", True),
        (socket.AF_INET6, "::", False),
    ],
)
def test_a_listener_that_nobody_knows_is_reported(
    family: socket.AddressFamily, host: str, loopback: bool, suite: SuiteState
) -> None:
    with socket.create_server((host, 0), family=family) as foreign:
        port = foreign.getsockname()[1]
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

        [found] = [each for each in listeners_of(suite) if each.address == address]
        finding = check_listeners(suite)

    assert (found.kind, found.loopback, found.pid) == (UNKNOWN, loopback, os.getpid())
    assert finding.status == "fail"
    assert address in finding.detail


def test_sockets_are_listed_with_both_ends(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
        socket.socket(socket.AF_UNIX) as unix,
        socket.socket(socket.AF_UNIX) as abstract,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as unix_datagrams,
    ):
        unix.bind(path)
        unix.listen()
        abstract.bind("\0moesaic-test-listeners")
        datagrams.bind(("127.0.0.1", 0))
        unix_datagrams.bind("\0moesaic-test-datagrams")

        found = set(open_sockets(os.getpid()))

        def name(sock: socket.socket) -> str:
            return "{}:{}".format(*sock.getsockname())

        assert {
            OpenSocket("tcp", name(server), True),
            OpenSocket("tcp", name(client), False, name(server)),
            OpenSocket("unix", path, True),
            OpenSocket("unix", "@moesaic-test-listeners", False),
            OpenSocket("udp", name(datagrams), True),
            OpenSocket("unix", "@moesaic-test-datagrams", True),
        } <= found


def test_a_process_that_is_gone_has_no_sockets() -> None:
    assert open_sockets(1 << 30) == []


def test_the_table_of_the_security_page_is_the_programs() -> None:
    lines = (ROOT / "SECURITY.md").read_text().splitlines()
    begin = lines.index("| listener | protocol | address | who may speak | what proves it |") + 2
    rows = []
    for line in lines[begin:]:
        if not line.startswith("|"):
            break
        rows.append(tuple(cell.strip() for cell in line.strip("|").split("|")))

    assert rows == [
        (name, kind.protocol, kind.address, kind.speakers, kind.proof)
        for name, kind in KINDS.items()
    ]
