"""What UCX may listen on: it reads what strangers send before anybody has proved anything."""

import re
import socket
from pathlib import Path
from typing import Any

import psutil
import pytest
from ucxx._lib import libucxx

from moesaic import addresses
from moesaic.errors import InvalidInput
from moesaic.transport.frame import FrameLimits
from moesaic.transport.ucx import interfaces
from moesaic.transport.ucx.interfaces import between_hosts, loopback
from moesaic.transport.ucx.network import UcxNetwork
from moesaic.transport.ucx.planes import Transports

LIMITS = FrameLimits.of_hidden_size(64)


@pytest.fixture(autouse=True)
def _nothing_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    monkeypatch.delenv("UCX_TLS", raising=False)


@pytest.fixture(params=[socket.AF_INET, socket.AF_INET6], ids=["ipv4", "ipv6"])
def outward(request: pytest.FixtureRequest) -> tuple[str, str]:
    """An address of this machine on a network with others, and its interface."""
    family = request.param
    listed = addresses._ipv4_interfaces if family == socket.AF_INET else addresses._ipv6_interfaces
    for address, interface in listed().items():
        text = socket.inet_ntop(family, address)
        if interface != "lo" and not text.startswith("fe80"):
            return text, interface
    pytest.skip("this machine has loopback addresses only")


@pytest.fixture
def rdma(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has an RDMA device, by the system's list of them."""
    monkeypatch.setattr(interfaces, "_RDMA_DEVICES", tmp_path)
    (tmp_path / "mlx5_0").mkdir()


def listened() -> set[tuple[str, int]]:
    """Addresses that this process listens on; some may be of other tests."""
    connections = psutil.Process().net_connections("inet")
    return {tuple(each.laddr) for each in connections if each.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize("address", [None, "127.0.0.1", "127.0.0.9", "::1"])
@pytest.mark.parametrize("private", [True, False])
def test_nothing_is_opened_between_hosts_for_this_machine_alone(
    address: Any, private: bool
) -> None:
    assert between_hosts(address, private) is None


@pytest.mark.parametrize("named", ["", "all", "^mlx5_0:1", "lo"])
def test_a_network_with_others_needs_the_operators_word(
    named: str, rdma: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", named)

    assert between_hosts("192.0.2.1", private=False) is None


@pytest.mark.parametrize("named", ["mlx5_9:1", "../etc", "eth99", "lo,mlx5_9:1"])
def test_a_device_that_this_machine_does_not_have_is_refused(
    named: str, rdma: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", named)

    with pytest.raises(InvalidInput, match=r"UCX_NET_DEVICES: this machine has no device .*mlx5_0"):
        between_hosts("192.0.2.1", private=False)


def test_on_a_private_network_all_interfaces_but_the_named_one_are_excluded(
    outward: tuple[str, str],
) -> None:
    address, interface = outward

    options = between_hosts(address, private=True)

    assert options is not None
    others = options["NET_DEVICES"].removeprefix("^").split(",")
    assert {*others, interface} == {name for _, name in socket.if_nameindex()}
    assert interface not in others


def test_what_the_environment_says_of_a_private_network_holds(
    outward: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "all")
    monkeypatch.setenv("UCX_TLS", "tcp")

    assert between_hosts(outward[0], private=True) == {}


@pytest.mark.parametrize("address", ["198.51.100.1", "2001:db8::1"])
def test_an_address_of_another_machine_is_refused(address: str) -> None:
    with pytest.raises(InvalidInput, match=f"data_host: .*{address}"):
        between_hosts(address, private=True)


@pytest.mark.parametrize(
    ("tls", "expected"),
    [
        (None, "^shm,tcp"),
        ("all", "^shm,tcp"),
        ("tcp", "^shm,tcp"),
        ("rc,cuda_copy", "rc,cuda_copy"),
        ("rc,tcp,cuda_copy", "rc,cuda_copy"),
        ("^shm", "^shm,tcp"),
    ],
)
@pytest.mark.parametrize("private", [True, False])
def test_rdma_devices_that_are_named_are_used_without_tcp(
    tls: str | None, expected: str, private: bool, rdma: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "lo,mlx5_0:1")
    if tls is not None:
        monkeypatch.setenv("UCX_TLS", tls)

    options = between_hosts("192.0.2.1", private)

    assert options == {"NET_DEVICES": "mlx5_0:1", "TLS": expected}


@pytest.mark.parametrize("transports", ["tcp", "auto"])
async def test_peers_are_told_of_no_other_network(
    outward: tuple[str, str], transports: Transports, planes: list[Any]
) -> None:
    address, interface = outward

    network = UcxNetwork("w", "expert", b"s", LIMITS, transports, address, private=True)
    context = libucxx.UCXContext(planes[-1].options, (libucxx.Feature.TAG,))
    await network.close()

    assert set(re.findall(r"resource .* tcp/(\S+)", context.info)) == {interface}


@pytest.mark.parametrize("transports", ["auto", "socket", "ring", "shm", "tcp"])
@pytest.mark.parametrize("address", [None, "127.0.0.1"])
async def test_a_network_of_this_machine_listens_on_loopback_only(
    transports: Transports, address: str | None
) -> None:
    before = listened()
    network = UcxNetwork("w", "expert", b"s", LIMITS, transports, address)
    opened = listened() - before
    await network.close()

    assert {host for host, _ in opened} == ({"127.0.0.1"} if transports == "tcp" else set())


async def test_by_default_nothing_of_ucx_listens_on_a_network_with_others(
    outward: tuple[str, str],
) -> None:
    before = listened()
    network = UcxNetwork("w", "expert", b"s", LIMITS, own_address=outward[0])
    opened = listened() - before
    await network.close()

    assert not opened


def test_tcp_of_ucx_is_refused_on_a_network_that_is_not_private(outward: tuple[str, str]) -> None:
    with pytest.raises(InvalidInput, match=r"transports: .*--private-network"):
        UcxNetwork("w", "expert", b"s", LIMITS, "tcp", outward[0])


def test_loopback_is_the_interface_of_the_loopback_address() -> None:
    assert loopback() == {"NET_DEVICES": "lo"}
