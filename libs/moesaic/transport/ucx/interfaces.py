"""The one network interface for tensors; UCX by itself would use all, control networks included."""

import ipaddress
import os
import socket

from moesaic.addresses import interface_of
from moesaic.errors import InvalidInput


def only_network(own_address: str | None) -> dict[str, str]:
    """Give UCX's options that exclude all interfaces but the one with ``own_address``.

    The others are excluded by name, as a list of the allowed would have to name RDMA devices too.
    No interface is excluded for a loopback address, for an address that means all, and where
    ``UCX_NET_DEVICES`` is set.

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
