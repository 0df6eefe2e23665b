import re
import socket

import pytest
from ucxx._lib import libucxx

from moesaic import addresses
from moesaic.errors import InvalidInput
from moesaic.transport.frame import FrameLimits
from moesaic.transport.ucx.interfaces import only_network
from moesaic.transport.ucx.network import UcxNetwork

LIMITS = FrameLimits.of_hidden_size(64)


@pytest.fixture(autouse=True)
def _nothing_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)


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


def test_all_interfaces_but_the_one_with_the_address_are_excluded(outward) -> None:
    address, interface = outward

    others = only_network(address)["NET_DEVICES"].removeprefix("^").split(",")

    assert {*others, interface} == {name for _, name in socket.if_nameindex()}
    assert interface not in others


@pytest.mark.parametrize("address", [None, "127.0.0.1", "127.0.0.9", "::1", "0.0.0.0", "::"])
def test_addresses_that_name_no_network_exclude_nothing(address) -> None:
    assert only_network(address) == {}


def test_what_the_environment_says_holds(outward, monkeypatch) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "all")

    assert only_network(outward[0]) == {}


@pytest.mark.parametrize("address", ["198.51.100.1", "2001:db8::1"])
def test_an_address_of_another_machine_is_refused(address) -> None:
    with pytest.raises(InvalidInput, match=f"data_host: .*{address}"):
        only_network(address)


@pytest.mark.parametrize("transports", ["tcp", "auto"])
async def test_peers_are_told_of_no_other_network(outward, transports, planes) -> None:
    address, interface = outward

    async def opened(own_address: str | None) -> tuple[set[str], int]:
        network = UcxNetwork("w", "expert", b"s", LIMITS, transports, own_address)
        plane = planes[-1]  # of the network, behind that of shared memory
        context = libucxx.UCXContext(plane.options, (libucxx.Feature.TAG,))
        listed = re.findall(r"resource .* tcp/(\S+)", context.info)
        await network.close()
        return set(listed), len(plane.worker.address)

    every_device, full_length = await opened(None)
    devices, length = await opened(address)

    assert every_device > {interface}
    assert devices == {interface}
    assert length < full_length  # what peers are told
