"""Hosts on one machine, joined by slow links: the emulator of ``moesaic up --link``, for all benchmarks.

Links have a rate and a delay. The kernel's token bucket limits each host's link, each way. It
passes a burst of 100 µs of the rate, or 4 KiB; it queues 100 ms of frames and drops more. Each
frame is delayed once from one host to another. The kernel's ``netem`` adds the delay. If it is
missing, a process forwards frames, at up to about 1 Gbit/s.

Frames, TCP and full queues are real. There is no loss but in full queues, no jitter and no other traffic, and all hosts
share this machine's processors and memory. It needs root, ``ip`` and ``tc``.
"""

import ctypes
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from moesaic.cli.checks.links import check_links
from moesaic.cli.machine.links.cables import UPLINK, CableNetwork, call, set_rate
from moesaic.cli.machine.links.link import LinkShape
from moesaic.cli.machine.links.network import NAMESPACES, forwarding_command, joined
from moesaic.cli.terminal.outcome import CommandError

_CLONE_NEWIPC = 0x08000000
_FIRST_MBIT = 1000.0


class NoLinks(Exception):
    """This machine does not allow hosts with links; the text gives the reason."""


@dataclass(frozen=True)
class LinkedHosts:
    """Hosts with an address each; processes get there by ``command``, or enter by themselves."""

    network: CableNetwork

    @property
    def addresses(self) -> dict[str, str]:
        """Addresses by the names of hosts, in the order in which they were named."""
        return {cable.agent: cable.address for cable in self.network.cables}

    def shape(self, mbit: float) -> None:
        """Hold all links to this rate from now on, each way; 0: to none."""
        if mbit:
            set_rate(self.network, round(mbit * 1e6))
            return
        # So that there is something to delete.
        self.shape(_FIRST_MBIT)
        inside = ("parent", "1:1") if self.network.netem else ("root",)
        for cable in self.network.cables:
            call("tc", "-n", cable.namespace, "qdisc", "del", "dev", UPLINK, *inside)
            call("tc", "-n", self.network.switch, "qdisc", "del", "dev", cable.port, "root")

    def command(self, host: str, command: Sequence[str]) -> list[str]:
        """Make a command line that runs ``command`` on a host."""
        return [*self.network.cable(host).enter, *command]

    def enter(self, host: str) -> None:
        """Move this process, which must have one thread, to a host; only processes it forks share its memory."""
        libc = ctypes.CDLL(None, use_errno=True)
        with (NAMESPACES / self.network.cable(host).namespace).open("rb") as namespace:
            if libc.setns(namespace.fileno(), 0) or libc.unshare(_CLONE_NEWIPC):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def told(self) -> dict[str, Any]:
        """Return the data, as JSON, with which another process can ``find`` the hosts."""
        return dict(msgspec.to_builtins(self.network))

    @staticmethod
    def find(told: Mapping[str, Any]) -> "LinkedHosts":
        """Find the hosts that another process has made."""
        return LinkedHosts(msgspec.convert(told, CableNetwork))


@contextmanager
def linked_hosts(
    names: Sequence[str], mbit: float = 0.0, delay_ms: float = 0.0
) -> Iterator[LinkedHosts]:
    """Make hosts for the length of the block.

    Args:
        names: names of the hosts.
        mbit: rate of all links; 0: none.
        delay_ms: from host to host, one way.

    Raises:
        NoLinks: this machine does not allow it.
    """
    link = LinkShape(round((mbit or _FIRST_MBIT) * 1e6), round(delay_ms * 1e3))
    with ExitStack() as stack:
        try:
            check_links("", ())
            hosts = LinkedHosts(stack.enter_context(joined(names, link)))
        except CommandError as error:
            raise NoLinks(str(error)) from error
        if command := forwarding_command(hosts.network):
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            stack.callback(process.communicate)
            stack.callback(process.kill)
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise NoLinks("frames cannot be delayed; the error is above")
        if not mbit:
            hosts.shape(0)
        yield hosts
