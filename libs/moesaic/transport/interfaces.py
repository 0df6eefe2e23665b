"""Which network do tensors use? UCX would take every interface there is, control networks as well."""

import fcntl
import ipaddress
import os
import socket
import struct
from array import array
from pathlib import Path

from moesaic.errors import InvalidInput

_SIOCGIFCONF = 0x8912  # lists the IPv4 addresses of all interfaces
_IFREQ = struct.Struct("16s2xH4s16x")  # interface, its address: port, address, padding
_MAX_ADDRESSES = 4096


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
    own = _ipv4_interfaces() if address.version == 4 else _ipv6_interfaces()
    if address.packed not in own:
        raise InvalidInput("data_host", f"no network interface of this machine has {own_address}")
    others = {name for _, name in socket.if_nameindex()} - {own[address.packed]}
    return {"NET_DEVICES": "^" + ",".join(sorted(others))} if others else {}


def _ipv4_interfaces() -> dict[bytes, str]:
    """Interfaces by address."""
    answer = array("B", bytes(_MAX_ADDRESSES * _IFREQ.size))
    request = struct.pack("iP", len(answer), answer.buffer_info()[0])  # struct ifconf
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        filled, _ = struct.unpack("iP", fcntl.ioctl(sock, _SIOCGIFCONF, request))
    found = _IFREQ.iter_unpack(answer.tobytes()[:filled])
    # A second address may be labelled "eth0:1".
    return {address: name.rstrip(b"\0").decode().partition(":")[0] for name, _, address in found}


def _ipv6_interfaces() -> dict[bytes, str]:
    """Interfaces by address."""
    table = Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines()
    return {bytes.fromhex(row.split()[0]): row.split()[-1] for row in table}
