"""Hosts of a small network on one machine: network namespaces, joined by a bridge, with links of a set rate.

Every host has a virtual cable to the bridge; the kernel's token bucket (``tc``'s ``tbf``) holds its rate both ways.
Packets are real, and so is the kernel's TCP; only the cable is not. This needs root and the ``ip`` and ``tc`` commands.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

QUEUE_MS = 200  # of packets that wait at a link; more are dropped
BURST_BYTES = 128 << 10  # that pass at once: at most two of the kernel's segments


class NotPermitted(Exception):
    """Namespaces cannot be made here; the text gives the reason."""


@dataclass(frozen=True)
class Host:
    """One namespace."""

    name: str
    address: str
    cable: str  # the end that the bridge has; ``uplink`` in the namespace is the other

    def command(self, command: Sequence[str]) -> list[str]:
        """A command line that runs ``command`` on this host."""
        return ["ip", "netns", "exec", self.name, *command]


@dataclass(frozen=True)
class HostNetwork:
    """Hosts, and this machine's own address among them."""

    own_address: str
    hosts: tuple[Host, ...]

    def shape(self, mbit: float) -> None:
        """Give every link this rate, each way; 0: no limit."""
        for host in self.hosts:
            for where, device in (((), host.cable), (("-n", host.name), "uplink")):
                subprocess.run(
                    ["tc", *where, "qdisc", "del", "dev", device, "root"], capture_output=True
                )
                if mbit:
                    rate = ("rate", f"{mbit}mbit", "burst", str(BURST_BYTES))
                    queue = ("latency", f"{QUEUE_MS}ms")
                    _run("tc", *where, "qdisc", "add", "dev", device, "root", "tbf", *rate, *queue)


@contextmanager
def shaped_hosts(count: int) -> Iterator[HostNetwork]:
    """Make ``count`` hosts, at first without limits; they go at the end.

    Raises:
        NotPermitted: this machine does not allow it.
    """
    for command in ("ip", "tc"):
        if shutil.which(command) is None:
            raise NotPermitted(f"there is no {command} command (package iproute2)")
    mark = f"{os.getpid() % 0xFFFF:x}"
    bridge, net = f"mo{mark}b", f"10.{200 + os.getpid() % 50}.{os.getpid() // 50 % 250}"
    with ExitStack() as undo:
        _make(undo, "link", bridge, "link", "add", bridge, "type", "bridge")
        _run("ip", "addr", "add", f"{net}.254/24", "dev", bridge)
        _run("ip", "link", "set", bridge, "up")
        hosts = []
        for idx in range(count):
            host = Host(f"moesaic-{mark}-{idx}", f"{net}.{idx + 1}", f"mo{mark}h{idx}")
            _make(undo, "netns", host.name, "netns", "add", host.name)
            _make(
                undo,
                *("link", host.cable, "link", "add", host.cable, "type", "veth"),
                *("peer", "name", "uplink", "netns", host.name),
            )
            _run("ip", "link", "set", host.cable, "master", bridge, "up")
            inside = ("ip", "-n", host.name)
            _run(*inside, "addr", "add", f"{host.address}/24", "dev", "uplink")
            for device in ("lo", "uplink"):
                _run(*inside, "link", "set", device, "up")
            hosts.append(host)
        yield HostNetwork(f"{net}.254", tuple(hosts))


def _make(undo: ExitStack, kind: str, name: str, *arguments: str) -> None:
    """Run ``ip`` with ``arguments``; the ``kind`` called ``name`` that it makes goes at the end."""
    try:
        _run("ip", *arguments)
    except RuntimeError as error:
        raise NotPermitted(str(error)) from error
    remove = ("ip", "netns", "del", name) if kind == "netns" else ("ip", "link", "del", name)
    undo.callback(subprocess.run, remove, capture_output=True)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
