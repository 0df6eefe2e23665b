"""Where each topology listens: as SECURITY.md says, and on one machine nowhere that others reach."""

import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from moesaic.cli.checks.links import check_links
from moesaic.cli.checks.listeners import KINDS
from moesaic.cli.machine.sockets import OpenSocket, open_sockets
from moesaic.cli.terminal.outcome import CommandError
from tests.suites import Suite, running

EVERYWHERE = {"REST", "gRPC", "metrics", "Redis"}
MEETING = "@moesaic-"
TOPOLOGIES: dict[str, tuple[tuple[str, ...], set[str]]] = {
    "local": (("--topology", "local"), EVERYWHERE),
    "disaggregated": ((), EVERYWHERE | {"tensors"}),
    "gathered": (("--topology", "gathered", "--attention", "2"), EVERYWHERE | {"tensors"}),
    "edge": (("--topology", "edge"), EVERYWHERE | {"tensors"}),
    "tensor-parallel": (("--tensor-parallel", "2"), EVERYWHERE | {"tensors", "ranks"}),
    "ucx": (("--transports", "tcp"), EVERYWHERE | {"tensors", "UCX"}),
    "ucx-shm": (("--transports", "shm"), EVERYWHERE | {"tensors", "UCX"}),
}


def listeners(suite: Suite) -> list[dict[str, Any]]:
    """What the doctor lists."""
    findings = json.loads(suite.cli("doctor", "--json").stdout)
    [found] = [each for each in findings if each["name"] == "listeners"]
    return list(found["listeners"])


def settled(listed: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without those that are there for the length of a handshake."""
    return [each for each in listed if not each["address"].startswith(MEETING)]


def processes(suite: Suite) -> list[psutil.Process]:
    """All processes of a suite: its supervisor, and all that descend from it."""
    supervisor = psutil.Process(suite.state()["pid"])
    return [supervisor, *supervisor.children(recursive=True)]


def sockets(suite: Suite) -> list[OpenSocket]:
    return [each for process in processes(suite) for each in open_sockets(process.pid)]


@pytest.mark.parametrize("name", list(TOPOLOGIES))
def test_a_topology_listens_as_the_table_says_and_on_this_machine_only(
    name: str, tmp_path: Path
) -> None:
    flags, kinds = TOPOLOGIES[name]
    with running(tmp_path, *flags) as suite:
        listed, found = settled(listeners(suite)), sockets(suite)

    addresses = {each["address"] for each in listed}
    assert {each["kind"] for each in listed} == kinds
    assert kinds <= KINDS.keys()
    listening = {each.address for each in found if each.listens}
    assert {each for each in listening if not each.startswith(MEETING)} == addresses
    assert all(each["loopback"] for each in listed)
    # Whatever is connected is connected with one of these, so nothing leads elsewhere.
    linked = [each for each in found if each.protocol == "tcp" and not each.listens]
    assert linked
    assert all({each.address, each.peer} & addresses for each in linked)
    assert not [each for each in found if each.protocol == "udp"]


def test_hosts_that_are_apart_listen_on_their_own_network_only(tmp_path: Path) -> None:
    try:
        check_links("", ())
    except CommandError as error:
        pytest.skip(str(error))
    with running(tmp_path, "--topology", "edge", "--link", "1gbit") as suite:
        listed = listeners(suite)

    agents = [each for each in listed if each["process"].startswith("agent-")]
    hosts = {each["process"]: each["address"].rpartition(":")[0] for each in agents}
    assert {each["kind"] for each in agents} == {"gRPC", "metrics", "tensors"}
    assert len(set(hosts.values())) == len(hosts) == 3
    for each in agents:
        assert each["address"].rpartition(":")[0] == hosts[each["process"]]
    assert all(each["loopback"] for each in listed if each not in agents)
