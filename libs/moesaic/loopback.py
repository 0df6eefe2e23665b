"""Loopback: which hosts only this machine reaches, in every spelling, and without looking names up.

An address has many spellings: ``127.1``, ``[::1]`` and ``::ffff:127.0.0.1`` are loopback too. All
that compare a host with loopback ask here. The module imports the standard library alone.
"""

import ipaddress
import re
import socket

_NUMBER = r"(?:0[xX][0-9a-fA-F]+|[0-9]+)"
_SHORT_IPV4 = re.compile(rf"{_NUMBER}(?:\.{_NUMBER}){{0,3}}")
_LOCAL_NAME = re.compile(r"(?:[a-z0-9_-]{1,63}\.)*localhost\.?", re.IGNORECASE | re.ASCII)


def read_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Read an IP address in any spelling that the system's resolver or a URL knows; None for names.

    IPv6 may have brackets and a scope; IPv4 may be short, octal or hexadecimal, or mapped into IPv6.
    """
    inner = host[1:-1] if host.startswith("[") and host.endswith("]") and ":" in host else host
    try:
        address = ipaddress.ip_address(inner)
    except ValueError:
        return _short_ipv4(inner)
    return getattr(address, "ipv4_mapped", None) or address


def is_loopback(host: str) -> bool:
    """Tell whether only this machine reaches ``host``, an address or a name without a port.

    Of all names, only ``localhost`` and those below it are loopback by themselves (RFC 6761).
    """
    address = read_address(host)
    if address is not None:
        return address.is_loopback
    return _LOCAL_NAME.fullmatch(host) is not None


def plain_host(host: str) -> str:
    """Spell ``host`` as sockets take it: IPv6 without brackets, loopback and "everywhere" in their usual form."""
    address = read_address(host)
    if address is None:
        return host.lower().removesuffix(".") if is_loopback(host) else host
    if address.is_loopback or address.is_unspecified:
        # Without a scope
        return str(ipaddress.ip_address(address.packed))
    return host.removeprefix("[").removesuffix("]")


def _short_ipv4(host: str) -> ipaddress.IPv4Address | None:
    """Read IPv4 as ``inet_aton`` does, which by itself would skip what follows a space."""
    if not _SHORT_IPV4.fullmatch(host):
        return None
    try:
        return ipaddress.IPv4Address(socket.inet_aton(host))
    except OSError:
        return None
