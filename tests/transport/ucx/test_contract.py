import pytest

from tests.transport.conftest import APART, KINDS
from tests.transport.link_contract import LinkContract
from tests.transport.network_contract import NetworkContract


@pytest.mark.parametrize("cluster", [*KINDS, "tcp" + APART, "shm" + APART], indirect=True)
class TestUcx(NetworkContract, LinkContract):
    """Networks of processes, over each transport, with C functions and without, and with parcels."""
