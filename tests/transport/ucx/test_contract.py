import socket
from typing import Any

import pytest

from moesaic.errors import InUse
from moesaic.transport.contract import Handler
from moesaic.transport.frame import Frame
from tests.transport.conftest import APART, KINDS
from tests.transport.link_contract import LinkContract
from tests.transport.network_contract import Ask, NetworkContract
from tests.waiting import HANG_S


@pytest.mark.parametrize(
    "cluster", [*KINDS, "tcp" + APART, "shm" + APART, "auto" + APART], indirect=True
)
class TestUcx(NetworkContract, LinkContract):
    """Networks of processes, over each transport, with C functions and without, and with parcels."""


@pytest.mark.parametrize("cluster", ["socket"], indirect=True)
async def test_a_port_that_is_taken_is_a_matter_of_time(cluster: Any, echo: Handler) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InUse, match=rf"data_port: cannot listen on 127\.0\.0\.1:{port}"):
            await cluster.network("near").listen("127.0.0.1", port, echo)


@pytest.mark.parametrize("cluster", ["socket"], indirect=True)
async def test_an_ipv6_address_is_dialled_as_it_was_listened_on(
    cluster: Any, echo: Handler, ask: Ask
) -> None:
    near, far = cluster.network("near"), cluster.network("far")
    address = await far.listen("::1", 0, echo)
    assert address.startswith("[::1]:")

    link = await near.connect(address, "far", HANG_S)
    (outcome,) = await near.exchange([(link, ask())], HANG_S)
    assert isinstance(outcome, Frame)
