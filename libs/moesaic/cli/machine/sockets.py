"""The sockets of a process, as the kernel lists them, also in a network namespace of its own."""

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

from moesaic.addresses import host_port

_LISTENS, _UDP_UNCONNECTED = "0A", "07"
_UNIX_LISTENS, _UNIX_DATAGRAMS = 0x10000, "0002"


class OpenSocket(NamedTuple):
    """One socket of a process."""

    protocol: Literal["tcp", "udp", "unix"]
    address: str  # host:port; or a path, with "@" for one in the abstract namespace
    listens: bool  # for connections, or for messages of anybody
    peer: str = ""  # the other end of a TCP connection, host:port


def open_sockets(pid: int) -> list[OpenSocket]:
    """List the sockets that have an address; none of a process that is gone or another user's."""
    own = _inodes(pid)
    net = Path(f"/proc/{pid}/net")
    found = [
        each
        for name in ("tcp", "tcp6", "udp", "udp6")
        for inode, each in _inet(net / name, name)
        if inode in own
    ]
    found += [each for inode, each in _unix(net / "unix") if inode in own]
    return sorted(set(found))


def _inodes(pid: int) -> set[str]:
    found = set()
    with suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                target = os.readlink(entry.path)
                if target.startswith("socket:["):
                    found.add(target[8:-1])
    return found


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()[1:]
    except OSError:
        return []


def _inet(path: Path, name: str) -> Iterator[tuple[str, OpenSocket]]:
    protocol: Literal["tcp", "udp"] = "tcp" if name.startswith("tcp") else "udp"
    waits = _LISTENS if protocol == "tcp" else _UDP_UNCONNECTED
    for line in _lines(path):
        fields = line.split()
        listens = fields[3] == waits
        peer = "" if listens else _address(fields[2])
        yield fields[9], OpenSocket(protocol, _address(fields[1]), listens, peer)


def _address(text: str) -> str:
    """Read an address as the kernel writes it: words of the machine's order, in hexadecimal."""
    number, _, port = text.partition(":")
    words = [int(number[at : at + 8], 16) for at in range(0, len(number), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    mapped = len(packed) == 16 and packed.startswith(bytes(10) + b"\xff\xff")
    if mapped:
        packed = packed[12:]
    family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
    return host_port(socket.inet_ntop(family, packed), int(port, 16))


def _unix(path: Path) -> Iterator[tuple[str, OpenSocket]]:
    for line in _lines(path):
        fields = line.split(maxsplit=7)
        if len(fields) == 8:
            listens = bool(int(fields[3], 16) & _UNIX_LISTENS) or fields[4] == _UNIX_DATAGRAMS
            yield fields[6], OpenSocket("unix", fields[7], listens)
