"""IP addresses and host names, and those of a name's addresses that this machine has.

In containers one name on one network often stands for all replicas of a service. Each replica finds
its own address on that network among the addresses of the name. The module imports the standard
library alone, for probes that are started every few seconds.
"""

import fcntl
import ipaddress
import re
import socket
import struct
from array import array
from pathlib import Path

from moesaic.loopback import is_loopback, read_address

_SIOCGIFCONF = 0x8912  # lists the IPv4 addresses of all interfaces
_IFREQ = struct.Struct("16s2xH4s16x")  # interface, its address: port, address, padding
_MAX_ADDRESSES = 4096
_HOST_PORT = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]{1,255}):([0-9]{1,5})")
_HOST_NAME = re.compile(r"[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")


def host_port(host: str, port: int) -> str:
    """Join ``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_host_port(address: str) -> bool:
    """True if ``address`` is a host, or an IPv6 address in brackets, and a port that can be dialled."""
    found = _HOST_PORT.fullmatch(address)
    return found is not None and 0 < int(found[2]) < 1 << 16


def public_url(url: str) -> str:
    """Hide credentials in a URL, before its host or among its parameters."""
    return re.sub(r"([?&]password=)[^&#]*", r"\1***", re.sub(r"(://).*@", r"\1***@", url))


def is_address(host: str) -> bool:
    """True if ``host`` is an IP address, not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_everywhere(host: str) -> bool:
    """True for ``0.0.0.0`` and ``::``: all addresses of this machine, and none to dial."""
    address = read_address(host)
    return address is not None and address.is_unspecified


def is_name(host: str) -> bool:
    """True if ``host`` can be a host name; ``10.0.0.256`` and ``10.1`` count as mistakes."""
    numeric = "." in host and set(host) <= set("0123456789.")
    return not numeric and bool(_HOST_NAME.fullmatch(host))


def own_addresses_of(name: str) -> list[str]:
    """Look up the addresses of ``name`` that this machine has; blocks meanwhile.

    Returns:
        IPv4 before IPv6, and loopback last, as others should be able to dial the first. The order
        does not depend on the order of the answers.
    """
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # the latter: no valid name
        return []
    addresses = dict.fromkeys(str(where[0]) for *_, where in found)
    own = [a for a in addresses if not is_everywhere(a) and is_of_this_machine(a)]
    return sorted(own, key=_rank)


def is_of_this_machine(address: str) -> bool:
    """True if this machine has ``address`` now, so that a socket can be bound to it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.bind((address, 0))
    except OSError:
        return False
    return True


def interface_of(address: str) -> str | None:
    """Find the network interface with ``address``; None if this machine has none."""
    packed = ipaddress.ip_address(address).packed
    return (_ipv4_interfaces() if len(packed) == 4 else _ipv6_interfaces()).get(packed)


def _ipv4_interfaces() -> dict[bytes, str]:
    """Interfaces by address."""
    answer = array("B", bytes(_MAX_ADDRESSES * _IFREQ.size))
    # Struct ifconf
    request = struct.pack("iP", len(answer), answer.buffer_info()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        filled, _ = struct.unpack("iP", fcntl.ioctl(sock, _SIOCGIFCONF, request))
    found = _IFREQ.iter_unpack(answer.tobytes()[:filled])
    # A second address may be labelled "eth0:1".
    return {address: name.rstrip(b"\0").decode().partition(":")[0] for name, _, address in found}


def _ipv6_interfaces() -> dict[bytes, str]:
    """Interfaces by address."""
    table = Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines()
    return {bytes.fromhex(row.split()[0]): row.split()[-1] for row in table}


def _rank(address: str) -> tuple[bool, int, int]:
    parsed = ipaddress.ip_address(address)
    return is_loopback(address), parsed.version, int(parsed)
