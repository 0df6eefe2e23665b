"""Names become addresses of this machine. The network is told by the test, the sockets are real."""

import asyncio
import socket
from dataclasses import dataclass, field

import pytest
from structlog.testing import capture_logs

import moesaic.addresses
from moesaic.cluster import own_addresses as own_addresses_module
from moesaic.cluster.lifecycle import stop_event
from moesaic.cluster.own_addresses import own_address, own_addresses
from moesaic.cluster.rpc.server import admin_server
from moesaic.errors import NotReady
from moesaic.settings import ModelSettings, ServiceSettings
from tests.waiting import until

OURS, OURS_TOO, FOREIGN = "127.0.0.5", "127.0.0.7", "198.51.100.1"


@dataclass
class Network:
    """What names stand for, and which addresses this machine has lost."""

    names: dict[str, list[str]] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    num_lookups: int = 0
    num_looks: int = 0  # at addresses that this machine may have lost

    def look_up(self, name: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        self.num_lookups += 1
        if name not in self.names:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return [(0, 0, 0, "", (address, 0)) for address in self.names[name]]


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Network:
    made, bound = Network(), moesaic.addresses.is_of_this_machine

    def is_of_this_machine(address: str) -> bool:
        made.num_looks += 1
        return address not in made.lost and bound(address)

    monkeypatch.setattr(socket, "getaddrinfo", made.look_up)
    for module in (moesaic.addresses, own_addresses_module):
        monkeypatch.setattr(module, "is_of_this_machine", is_of_this_machine)
    monkeypatch.setattr(own_addresses_module, "_LOOK_EVERY_S", 0.01)
    return made


async def test_literals_stand_for_themselves_and_nobody_is_asked(network):
    settings = ServiceSettings(host="0.0.0.0", control_host="::1")

    async with own_addresses(settings) as found:
        assert found == settings
    assert await own_address("::", "host") == "::"
    assert network.num_lookups == 0


async def test_each_name_becomes_the_address_this_machine_has_under_it(network):
    network.names = {"expert.control": [FOREIGN, OURS], "expert.tensors": [OURS_TOO, FOREIGN]}
    settings = ModelSettings(model="m", control_host="expert.control", data_host="expert.tensors")

    async with own_addresses(settings) as found:
        assert found.control == (OURS, OURS)
        assert found.data == (OURS_TOO, OURS_TOO)
        assert found.host == "127.0.0.1"
        async with admin_server(found, "expert", worker_id="e-1") as admin:
            assert admin.address.startswith(f"{OURS}:")


async def test_what_others_are_told_stays_what_was_advertised(network):
    network.names = {"expert.control": [OURS]}
    settings = ServiceSettings(control_host="expert.control", advertise_host="node-7")

    async with own_addresses(settings) as found:
        assert found.control == (OURS, "node-7")


async def test_a_service_waits_for_its_address_and_says_so_once(network):
    network.names = {"expert.tensors": [FOREIGN]}
    with capture_logs() as logs:
        finding = asyncio.create_task(own_address("expert.tensors", "data_host"))
        await until(lambda: network.num_lookups >= 3)
        network.names["expert.tensors"] = [FOREIGN, OURS]

        assert await finding == OURS

    (entry,) = logs
    assert entry["event"] == "service.waiting"
    assert "expert.tensors" in entry["waiting_for"]


async def test_a_service_that_waits_for_its_address_can_be_stopped(network):
    reached = False

    async with stop_event() as stop:
        asyncio.get_running_loop().call_later(0.05, stop.set)
        async with own_addresses(ServiceSettings(host="nobody.yet")):
            reached = True

    assert stop.cut_short
    assert not reached


async def test_another_address_under_the_name_ends_the_service_in_order(network):
    network.names = {"expert.tensors": [OURS]}
    settings = ModelSettings(model="m", data_host="expert.tensors")
    closed = False

    async def serve() -> None:
        nonlocal closed
        async with stop_event() as stop, own_addresses(settings):
            network.names["expert.tensors"], network.lost = [OURS_TOO, FOREIGN], {OURS}
            try:
                await stop.wait()
            finally:
                closed = True

    with pytest.raises(ExceptionGroup) as ended:
        await serve()

    (error,) = ended.value.exceptions
    assert isinstance(error, NotReady)
    assert str(error) == (
        "data_host: the address of expert.tensors changed from 127.0.0.5 to 127.0.0.7; restarting"
    )
    assert closed


@pytest.mark.parametrize("answers", [[], [OURS], [FOREIGN]])
async def test_an_address_that_is_only_gone_may_come_back(network, answers):
    network.names = {"expert.tensors": [OURS]}
    async with own_addresses(ServiceSettings(host="expert.tensors")):
        network.names["expert.tensors"], network.lost = answers, {OURS}
        asked = network.num_lookups
        await until(lambda: network.num_lookups > asked + 3)


async def test_an_address_that_stays_costs_no_lookups(network):
    network.names = {"expert.tensors": [OURS]}
    async with own_addresses(ServiceSettings(host="expert.tensors")):
        network.names["expert.tensors"] = [OURS_TOO]  # this machine still has the other
        looked = network.num_looks
        await until(lambda: network.num_looks > looked + 3)

    assert network.num_lookups == 1
