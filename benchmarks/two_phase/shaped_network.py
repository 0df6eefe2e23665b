"""Hosts as network namespaces, joined by a bridge over links of a given rate: real sockets, a real queue.

The kernel's token bucket (``tc tbf``) limits what leaves a host and what comes to it. Latency is added
by a process that forwards frames instead of the bridge (``moesaic.cli.machine.links.delayed_forwarding``), for
many kernels lack ``netem``.
"""

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from moesaic.cli.machine.links import delayed_forwarding

_CLONE_NEWIPC = 0x08000000
_BURST, _QUEUE = "32kb", "2s"  # little passes faster than the rate; nothing is dropped


class NoNamespaces(Exception):
    """This machine does not let us make network namespaces, or shape their links."""


class ShapedNetwork:
    """Namespaces with the addresses 10.231.7.1, .2, ..., in the order of their names."""

    def __init__(self, prefix: str, hosts: Sequence[str]) -> None:
        self.prefix, self._switch = prefix, f"{prefix}-switch"
        self._forwarding: subprocess.Popen[str] | None = None
        self.addresses = {host: f"10.231.7.{n}" for n, host in enumerate(hosts, start=1)}

    def shape(self, rate_mbit: int, delay_ms: float = 0.0) -> None:
        """Limit every link, both ways, to this rate, 0: to none; from host to host takes so long."""
        self._delay(delay_ms)
        for n, host in enumerate(self.addresses):
            for namespace, device in ((self._namespace(host), "eth0"), (self._switch, f"port{n}")):
                tc = ["ip", "netns", "exec", namespace, "tc", "qdisc"]
                subprocess.run(
                    [*tc, "del", "dev", device, "root"], capture_output=True, check=False
                )
                if rate_mbit:
                    rate = ["rate", f"{rate_mbit}mbit", "burst", _BURST, "latency", _QUEUE]
                    _call(*tc, "add", "dev", device, "root", "tbf", *rate)

    def _delay(self, delay_ms: float) -> None:
        if self._forwarding is not None:
            self._forwarding.kill()
            self._forwarding.communicate()
            self._forwarding = None
        ports = [f"port{n}" for n in range(len(self.addresses))]
        for port in ports:
            joined = ["nomaster"] if delay_ms else ["master", "bridge"]
            _call("ip", "-n", self._switch, "link", "set", port, *joined)
        if delay_ms:
            command = [sys.executable, "-m", delayed_forwarding.__name__]
            self._forwarding = subprocess.Popen(
                [*command, self._switch, str(delay_ms), *ports], stdout=subprocess.PIPE, text=True
            )
            assert self._forwarding.stdout is not None
            if self._forwarding.stdout.readline() != "ready\n":
                raise NoNamespaces("frames cannot be delayed; the error is above")

    def enter(self, host: str) -> None:
        """Move this process, which must have one thread, into the host; it shares memory with nobody
        outside any more, only with the processes that it forks."""
        libc = ctypes.CDLL(None, use_errno=True)
        with Path(f"/run/netns/{self._namespace(host)}").open("rb") as namespace:
            if libc.setns(namespace.fileno(), 0) or libc.unshare(_CLONE_NEWIPC):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def _namespace(self, host: str) -> str:
        return f"{self.prefix}-{host}"

    def _make(self) -> None:
        _call("ip", "netns", "add", self._switch)
        _call("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _call("ip", "-n", self._switch, "link", "set", "bridge", "up")
        for n, (host, address) in enumerate(self.addresses.items()):
            inside = self._namespace(host)
            _call("ip", "netns", "add", inside)
            _call("ip", "-n", inside, "link", "set", "lo", "up")
            far = ["peer", "name", "eth0", "netns", inside]
            _call("ip", "-n", self._switch, "link", "add", f"port{n}", "type", "veth", *far)
            _call("ip", "-n", self._switch, "link", "set", f"port{n}", "master", "bridge", "up")
            _call("ip", "-n", inside, "addr", "add", f"{address}/24", "dev", "eth0")
            _call("ip", "-n", inside, "link", "set", "eth0", "up")
        self.shape(1000)  # tells at once whether that can be done

    def _delete(self) -> None:
        if self._forwarding is not None:
            self._forwarding.kill()
            self._forwarding.communicate()
        for namespace in (*map(self._namespace, self.addresses), self._switch):
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)


@contextmanager
def shaped_network(hosts: Sequence[str]) -> Iterator[ShapedNetwork]:
    """The namespaces, for the length of the block.

    Raises:
        NoNamespaces: they cannot be had here; says why.
    """
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise NoNamespaces(f"there is no {tool} (Debian: apt install iproute2)")
    network = ShapedNetwork(f"moesaic{os.getpid()}", hosts)
    try:
        network._make()
        yield network
    finally:
        network._delete()


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoNamespaces(f"{' '.join(command)}: {done.stderr.strip()}")
