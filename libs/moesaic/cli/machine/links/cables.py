"""The cables of a running suite's agents: their rate, and their cutting and healing.

Another process finds them in the suite's state: ``StateFile().running().network``.
"""

import subprocess
from collections.abc import Collection

import msgspec

BURST_BYTES, BURST_S = 4 << 10, 100e-6  # little passes faster than the rate, but timers are coarse
QUEUE_MS = 100  # of frames that wait at a link; more are dropped, as a switch does
UPLINK = "uplink"  # an agent's end of its cable


class LinkFailed(Exception):
    """The system refuses a command on a link; the text gives the command and the reason."""


class Cable(msgspec.Struct, frozen=True, kw_only=True):
    """The cable between an agent, which has a namespace of its own, and the switch."""

    agent: str
    namespace: str
    address: str
    port: str  # the switch's end

    @property
    def enter(self) -> tuple[str, ...]:
        """The words before a command that run it where the agent is, sharing memory with nobody."""
        return ("ip", "netns", "exec", self.namespace, "unshare", "--ipc")


class CableNetwork(msgspec.Struct, frozen=True, kw_only=True):
    """The agents of a suite, joined by a switch."""

    switch: str  # its namespace
    cables: tuple[Cable, ...]
    own_port: str  # the switch's end of this machine's own cable
    delay_us: int
    netem: bool  # the kernel delays frames, so that the switch need not

    @property
    def ports(self) -> tuple[str, ...]:
        """All ports of the switch."""
        return (*(cable.port for cable in self.cables), self.own_port)

    def cable(self, agent: str) -> Cable:
        """Find the cable of an agent, by the name of its process."""
        return next(cable for cable in self.cables if cable.agent == agent)


def set_rate(network: CableNetwork, rate_bit: int, agents: Collection[str] | None = None) -> None:
    """Hold cables to a rate from now on, each way; what waits in their queues stays.

    Args:
        network: of the suite.
        rate_bit: in bit/s.
        agents: whose cables; None: all.

    Raises:
        LinkFailed: it cannot be done.
    """
    burst = max(BURST_BYTES, int(rate_bit / 8 * BURST_S))
    bucket = ("tbf", "rate", f"{rate_bit}bit", "burst", f"{burst}b", "latency", f"{QUEUE_MS}ms")
    inside = ("parent", "1:1") if network.netem and network.delay_us else ("root",)
    for cable in network.cables:
        if agents is None or cable.agent in agents:
            replace = ("qdisc", "replace", "dev")
            up = (*replace, UPLINK, *inside, "handle", "10:")
            down = (*replace, cable.port, "root", "handle", "10:")
            call("tc", "-n", cable.namespace, *up, *bucket)
            call("tc", "-n", network.switch, *down, *bucket)


def cut(network: CableNetwork, agent: str) -> None:
    """Pull an agent's cable: nothing comes to it or from it any more.

    Raises:
        LinkFailed: it cannot be done.
    """
    _set(network, agent, "down")


def heal(network: CableNetwork, agent: str) -> None:
    """Plug an agent's cable in again.

    Raises:
        LinkFailed: it cannot be done.
    """
    _set(network, agent, "up")


def _set(network: CableNetwork, agent: str, state: str) -> None:
    call("ip", "-n", network.switch, "link", "set", network.cable(agent).port, state)


def call(*command: str) -> None:
    """Run a command on links to its end.

    Raises:
        LinkFailed: it is not there, or fails.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise LinkFailed(f"{command[0]}: {error.strerror}") from error
    if done.returncode:
        raise LinkFailed(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
