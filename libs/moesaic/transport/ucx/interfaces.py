"""UCX's networks: RDMA devices that the operator names, a private network, or this host's loopback.

UCX parses what arrives before anybody has proved anything, and a wrong message ends the process. So it
opens TCP sockets on loopback only, unless the operator says that the network is private.
"""

import ipaddress
import os
import socket
from pathlib import Path

from moesaic.addresses import interface_of, is_everywhere
from moesaic.errors import InvalidInput
from moesaic.loopback import is_loopback

_RDMA_DEVICES = Path("/sys/class/infiniband")


def loopback() -> dict[str, str]:
    """Give UCX's options for this host's loopback interface alone."""
    return {"NET_DEVICES": interface_of("127.0.0.1") or "lo"}


def between_hosts(own_address: str | None, private: bool) -> dict[str, str] | None:
    """Give UCX's options between hosts.

    RDMA devices are those that ``UCX_NET_DEVICES`` names. Where there are some, UCX uses no others and
    no TCP. Without, it uses the network of ``own_address`` if that is ``private``.

    Returns:
        The options; ``None``: UCX shall not be used between hosts.

    Raises:
        InvalidInput: no interface has the address, or ``UCX_NET_DEVICES`` names an unknown device.
    """
    if rdma := _named_rdma_devices():
        return {"NET_DEVICES": ",".join(rdma), "TLS": _without_tcp(os.environ.get("UCX_TLS"))}
    if not private or own_address is None or is_loopback(own_address):
        return None
    tls = {} if "UCX_TLS" in os.environ else {"TLS": "^shm"}
    return tls | _only_network(own_address)


def _only_network(own_address: str) -> dict[str, str]:
    """Exclude all interfaces but the one with ``own_address``, if the environment names none.

    They are excluded by name, as a list of the allowed would have to name RDMA devices too.
    """
    if os.environ.get("UCX_NET_DEVICES") or is_everywhere(own_address):
        return {}
    own = interface_of(str(ipaddress.ip_address(own_address)))
    if own is None:
        raise InvalidInput("data_host", f"no network interface of this machine has {own_address}")
    others = {name for _, name in socket.if_nameindex()} - {own}
    return {"NET_DEVICES": "^" + ",".join(sorted(others))} if others else {}


def _named_rdma_devices() -> list[str]:
    named = os.environ.get("UCX_NET_DEVICES", "")
    if named in ("", "all") or named.startswith("^"):
        return []
    known = {each.name for each in _RDMA_DEVICES.iterdir()} if _RDMA_DEVICES.is_dir() else set()
    interfaces = {name for _, name in socket.if_nameindex()}
    devices = [device.strip() for device in named.split(",")]
    rdma = [device for device in devices if device.partition(":")[0] in known]
    if unknown := [device for device in devices if device not in interfaces and device not in rdma]:
        raise InvalidInput(
            "UCX_NET_DEVICES",
            f"this machine has no device {', '.join(unknown)}; it has {', '.join(sorted(known | interfaces))}",
        )
    return rdma


def _without_tcp(tls: str | None) -> str:
    """Take TCP out of a list of UCX's transports; one that begins with "^" excludes."""
    if not tls or tls == "all":
        return "^shm,tcp"
    if tls.startswith("^"):
        return tls + ",tcp"
    left = [name for name in tls.split(",") if name.strip() not in ("tcp", "all")]
    return ",".join(left) or "^shm,tcp"
