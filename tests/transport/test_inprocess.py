import pytest

from tests.transport.link_contract import LinkContract
from tests.transport.network_contract import NetworkContract


@pytest.mark.parametrize("cluster", ["inprocess"], indirect=True)
class TestInProcess(NetworkContract, LinkContract):
    """Networks of one process are held to what real ones promise, as tests of others use them instead."""
