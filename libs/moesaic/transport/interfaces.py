"""Which network do tensors use? UCX would take every interface there is, control networks as well."""

import ipaddress
import os
import socket

from moesaic.addresses import interface_of
from moesaic.errors import InvalidInput


def only_network(own_address: str | None) -> dict[str, str]:
    """UCX's options that keep it off all interfaces but the one that has ``own_address``.

    The others are excluded by name, for a list of those allowed would have to name the RDMA devices
    as well. Nothing is excluded for a loopback address, for one that means all, and where
    ``UCX_NET_DEVICES`` says what to use.

    Raises:
        InvalidInput: no interface has the address.
    """
    if own_address is None or os.environ.get("UCX_NET_DEVICES"):
        return {}
    address = ipaddress.ip_address(own_address)
    if address.is_loopback or address.is_unspecified:
        return {}
    own = interface_of(own_address)
    if own is None:
        raise InvalidInput("data_host", f"no network interface of this machine has {own_address}")
    others = {name for _, name in socket.if_nameindex()} - {own}
    return {"NET_DEVICES": "^" + ",".join(sorted(others))} if others else {}
