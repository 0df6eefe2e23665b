"""A network of agents on one machine: each in a network namespace, with a cable to a switch.

The switch has a namespace of its own, where no firewall of this machine's looks at frames. It is the
kernel's bridge; where frames must be delayed and the kernel has no ``netem``, it is a process, see
``delayed_forwarding``. This machine is joined to it, too, and nothing else is: nobody outside reaches
the agents, nor they anybody.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from moesaic.cli.machine.links.cables import UPLINK, Cable, CableNetwork, LinkFailed, call, set_rate
from moesaic.cli.machine.links.link import LinkShape
from moesaic.cli.machine.state import process_start_time
from moesaic.cli.terminal.outcome import CommandError, Exit

NAMESPACES = Path("/run/netns")
OWN_PORT = "own"
NETEM_LIMIT = "100000"  # frames on their way; a thousand, its default, are few on a fast, long link
# The supervisor's process id and start time tell the leftovers of a killed suite.
_OURS = re.compile(r"moesaic-up-(\d+)-(\d+)-.+")


@contextmanager
def joined(agents: Sequence[str], link: LinkShape) -> Iterator[CableNetwork]:
    """Make the network of a suite of this process; it goes at the end.

    Raises:
        CommandError: this machine does not allow it.
    """
    sweep()
    try:
        try:
            network = _make(agents, link)
        except LinkFailed as error:
            fix = "leave it out to run without"
            raise CommandError(f"--link: {error}; {fix}", Exit.USAGE) from error
        yield network
    finally:
        # At once; the kernel takes its time for what is in namespaces.
        subprocess.run(["ip", "link", "del", _own_device()], capture_output=True)
        _remove(name for name in _namespaces() if name.startswith(f"{_mark()}-"))


def sweep() -> None:
    """Remove what suites have left that were killed."""
    for name in _namespaces():
        found = _OURS.fullmatch(name)
        if found and process_start_time(int(found[1])) != int(found[2]):
            _remove([name])


def forwarding_command(network: CableNetwork) -> tuple[str, ...]:
    """Give the command line of the process that is the switch; empty where the kernel is."""
    if network.netem or not network.delay_us:
        return ()
    module = f"{__package__}.delayed_forwarding"
    delay_ms = str(network.delay_us / 1e3)
    return (sys.executable, "-m", module, network.switch, delay_ms, *network.ports)


def _make(agents: Sequence[str], link: LinkShape) -> CableNetwork:
    mark, net = _mark(), _free_net()
    switch, own = f"{mark}-switch", _own_device()
    call("ip", "netns", "add", switch)
    call("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
    call("ip", "-n", switch, "link", "set", "bridge", "up")
    cables = tuple(
        Cable(agent=agent, namespace=f"{mark}-{agent}", address=f"{net}.{n}", port=f"port{n}")
        for n, agent in enumerate(agents, 1)
    )
    network = CableNetwork(
        switch=switch,
        cables=cables,
        own_port=OWN_PORT,
        delay_us=link.delay_us,
        netem=bool(link.delay_us) and _has_netem(switch),
    )
    call("ip", "link", "add", own, "type", "veth", "peer", "name", OWN_PORT, "netns", switch)
    _bring_up((), own, f"{net}.254")
    for cable in cables:
        call("ip", "netns", "add", cable.namespace)
        call("ip", "-n", cable.namespace, "link", "set", "lo", "up")
        far = ("peer", "name", UPLINK, "netns", cable.namespace)
        call("ip", "-n", switch, "link", "add", cable.port, "type", "veth", *far)
        _bring_up(("-n", cable.namespace), UPLINK, cable.address)
    master = () if forwarding_command(network) else ("master", "bridge")
    for port in network.ports:
        call("ip", "-n", switch, "link", "set", port, *master, "up")
    if network.netem:
        _delay(network, own)
    set_rate(network, link.rate_bit)
    # Tells at once whether agents can be started there.
    call(*cables[0].enter, "true")
    return network


def _bring_up(where: Sequence[str], device: str, address: str) -> None:
    call("ip", *where, "addr", "add", f"{address}/24", "dev", device)
    call("ip", *where, "link", "set", device, "up")


def _delay(network: CableNetwork, own: str) -> None:
    """Have the kernel delay what leaves agents and this machine, which is all that the switch gets."""
    netem = ("root", "handle", "1:", "netem", "delay", f"{network.delay_us}us")
    for where, device in [((), own), *((("-n", c.namespace), UPLINK) for c in network.cables)]:
        call("tc", *where, "qdisc", "add", "dev", device, *netem, "limit", NETEM_LIMIT)


def _has_netem(namespace: str) -> bool:
    try:
        call("tc", "-n", namespace, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms")
    except LinkFailed:
        return False
    call("tc", "-n", namespace, "qdisc", "del", "dev", "lo", "root")
    return True


def _free_net() -> str:
    """Choose a private network that this machine has no route to, by the first three numbers."""
    routes = subprocess.run(["ip", "-4", "route"], capture_output=True, text=True).stdout
    # Suites that start at once should not choose the same.
    first = os.getpid()
    nets = (f"10.{200 + n % 50}.{n // 50 % 250}" for n in range(first, first + 50 * 250))
    return next(net for net in nets if f"{net}." not in routes)


def _mark() -> str:
    return f"moesaic-up-{os.getpid()}-{process_start_time(os.getpid())}"


def _own_device() -> str:
    """Name this machine's end of its cable to the switch, in at most 15 letters."""
    return f"mo{os.getpid():x}"


def _namespaces() -> list[str]:
    return [path.name for path in NAMESPACES.iterdir()] if NAMESPACES.is_dir() else []


def _remove(names: Iterable[str]) -> None:
    """Remove namespaces with all that is in them, far ends of cables included."""
    for name in list(names):
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
