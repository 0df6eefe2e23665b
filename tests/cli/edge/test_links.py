"""Links between agents: real namespaces, real frames, and what is left of them: nothing."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moesaic.cli.checks.links import check_links
from moesaic.cli.machine.links.cables import Cable, CableNetwork, cut, heal, set_rate
from moesaic.cli.machine.links.link import LinkShape, read_link
from moesaic.cli.machine.links.network import NAMESPACES, forwarding_command, joined
from moesaic.cli.machine.state import SuiteState
from moesaic.cli.suite.options import SuiteOptions
from moesaic.cli.suite.processes import services_of
from moesaic.cli.suite.supervisor import command_of
from moesaic.cli.terminal.outcome import CommandError, Exit
from tests.cli.conftest import gone
from tests.waiting import eventually

Run = Callable[..., "subprocess.CompletedProcess[str]"]
Start = Callable[..., "subprocess.Popen[str]"]
Wait = Callable[[str], SuiteState]

AGENTS = ("agent-0", "agent-1", "agent-2")
MBIT = 1_000_000
SERVE = """
import socket
server = socket.create_server(("", 0))
print(server.getsockname()[1], flush=True)
while True:
    caller = server.accept()[0]
    while asked := caller.recv(8):
        size = int.from_bytes(asked, "little")
        caller.sendall(bytes(size))
"""
# Prints the median time of a short answer, and the rate of a long one.
ASK = """
import socket, sys, time
address, port, size = sys.argv[1:]
server = socket.create_connection((address, int(port)), 3)
def ask(size):
    started = time.perf_counter()
    server.sendall(size.to_bytes(8, "little"))
    while size:
        size -= len(server.recv(size))
    return time.perf_counter() - started
short = sorted(ask(1) for _ in range(9))[4]
print(short, int(size) / max(1e-9, ask(int(size)) - short))
"""


@pytest.mark.parametrize(
    ("text", "link"),
    [
        ("500mbit,2ms", LinkShape(500 * MBIT, 2000)),
        ("50mbit", LinkShape(50 * MBIT)),
        ("1.5gbit,50us", LinkShape(1500 * MBIT, 50)),
        ("100kbit, 1s", LinkShape(100_000, 1_000_000)),
        ("10MBit,0ms", LinkShape(10 * MBIT)),
    ],
)
def test_a_link_is_read_with_its_units(text: str, link: LinkShape) -> None:
    assert read_link(text) == link
    assert read_link(link.text) == link


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("500", "such as 500mbit,2ms"),
        ("500mbit,", "such as 500mbit,2ms"),
        ("500mbit,2", "such as 500mbit,2ms"),
        ("2ms,500mbit", "such as 500mbit,2ms"),
        ("500mbit,2ms,1", "such as 500mbit,2ms"),
        ("-5mbit", "such as 500mbit,2ms"),
        ("9kbit", "the lowest rate is 10kbit"),
        ("1gbit,11s", "the longest delay is 10s"),
    ],
)
def test_what_is_no_link_is_refused(text: str, says: str) -> None:
    with pytest.raises(CommandError, match=rf"^--link {text}: .*{says}") as raised:
        read_link(text)

    assert raised.value.status == Exit.USAGE


def test_agents_with_cables_are_machines_of_their_own() -> None:
    cables = tuple(
        Cable(agent=agent, namespace=f"ns-{agent}", address=f"10.200.1.{n}", port=f"port{n}")
        for n, agent in enumerate(AGENTS, 1)
    )
    network = CableNetwork(switch="s", cables=cables, own_port="own", delay_us=2000, netem=False)
    options = SuiteOptions(
        topology="edge", model="m", attention=1, experts=2, slots_per_layer=0, agents=3,
        link="500mbit,2ms", host="127.0.0.1", port=8000,
    )  # fmt: skip

    links, scheduler, agent, *_, gateway = services_of(options, 32, 2, network)

    command = command_of(agent, 1, 2)
    assert command[:6] == ["ip", "netns", "exec", "ns-agent-0", "unshare", "--ipc"]
    told = {flag: command[command.index(flag) + 1] for flag in command if flag.startswith("--")}
    for flag in ("--host", "--control-host", "--advertise-host", "--data-host"):
        assert told[flag] == agent.host == "10.200.1.1"
    assert (told["--node"], told["--transports"]) == ("agent-0", "socket")
    assert (scheduler.host, gateway.host, scheduler.enter) == ("127.0.0.1", "127.0.0.1", ())
    assert "10.200" not in " ".join((*scheduler.flags, *gateway.flags))
    assert command_of(links, 1, 2)[-6:] == ["s", "2.0", "port1", "port2", "port3", "own"]


@pytest.mark.parametrize(
    ("env", "flags", "says"),
    [
        ({"REDIS_URL": "redis://127.0.0.1:6379"}, (), "--link: agents .* unset REDIS_URL"),
        ({}, ("--transports=shm",), "--transports: --link sends tensors"),
        ({"PATH": "/nowhere"}, (), "--link: command ip not found; install iproute2"),
    ],
)
def test_links_that_cannot_serve_are_refused(
    env: dict[str, str], flags: tuple[str, ...], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_unless_permitted()
    for name, value in env.items():
        monkeypatch.setenv(name, value)

    with pytest.raises(CommandError, match=says) as raised:
        check_links(env.get("REDIS_URL", ""), flags)

    assert raised.value.status == Exit.USAGE


def test_without_the_right_links_are_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ip", "tc", "unshare"):
        (tmp_path / name).write_text("#!/bin/sh\necho Operation not permitted >&2; exit 1\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(CommandError, match=r"cannot be created .*not permitted.*run as root"):
        check_links("", ())


@pytest.fixture(params=["100mbit", "100mbit,10ms"])
def network(request: pytest.FixtureRequest) -> Iterator[CableNetwork]:
    """A network of three agents, frames forwarded; one bound to this process."""
    skip_unless_permitted()
    with joined(AGENTS, read_link(request.param)) as made:
        command = forwarding_command(made)
        if not command:
            yield made
            return
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as forwarding:
            assert forwarding.stdout is not None
            assert forwarding.stdout.readline() == "ready\n"
            yield made
            forwarding.kill()


def test_frames_have_the_rate_and_the_delay_of_the_link(network: CableNetwork) -> None:
    delay_s = network.delay_us / 1e6
    with answering(network.cables[0]) as port:
        from_here = asked(network, port)
        short_s, rate = asked(network, port, "agent-1")
        set_rate(network, 20 * MBIT, ["agent-0"])
        _, slow_rate = asked(network, port, "agent-1", size=MBIT)

    # Bounds are loose: other processes may have the cores.
    assert 2 * delay_s <= short_s < 2 * delay_s + 0.1
    assert from_here[0] >= 2 * delay_s
    assert 20 * MBIT < 8 * rate < 105 * MBIT
    assert 5 * MBIT < 8 * slow_rate < 22 * MBIT


def test_a_cut_cable_can_be_healed(network: CableNetwork) -> None:
    with answering(network.cables[0]) as port:

        def reached() -> bool:
            try:
                return asked(network, port, "agent-1", size=1)[0] > 0
            except subprocess.CalledProcessError:
                return False

        cut(network, "agent-0")
        assert not reached()
        heal(network, "agent-0")
        eventually(reached)  # the kernel may still be giving up on who did not answer


def test_nothing_of_a_network_is_left_behind() -> None:
    skip_unless_permitted()
    before = devices()
    with joined(AGENTS, LinkShape(100 * MBIT)) as network:
        made = {network.switch, *(cable.namespace for cable in network.cables)}
        assert made <= namespaces()
        assert len(devices()) == len(before) + 1

    assert not made & namespaces()
    assert devices() == before


def test_a_suite_runs_over_links_that_are_found_in_its_state(start: Start, suite: Wait) -> None:
    skip_unless_permitted()
    process = start("up", "--model", "model", "--port", "0", *EDGE, "--link", "100mbit,1ms")
    ready = suite("ready")
    by_name = {process.name: process for process in ready.processes}
    network = ready.network
    assert network is not None
    spaces = {
        name: space_of(by_name[name].pid, "net") for name in ("agent-0", "agent-1", "gateway")
    }
    memories = {name: space_of(by_name[name].pid, "ipc") for name in spaces}
    set_rate(network, 10 * MBIT)
    cut(network, "agent-1")
    process.terminate()
    process.communicate()

    assert process.returncode == 0
    assert len({*spaces.values()}) == len({*memories.values()}) == 3
    assert [cable.agent for cable in network.cables] == ["agent-0", "agent-1"]
    assert by_name["agent-1"].admin_address.startswith(f"{network.cables[1].address}:")
    assert not {network.switch, *(cable.namespace for cable in network.cables)} & namespaces()


def test_what_a_killed_suite_left_goes_with_down(start: Start, suite: Wait, run: Run) -> None:
    skip_unless_permitted()
    process = start("up", "--model", "model", "--port", "0", *EDGE, "--link", "1gbit")
    ready = suite("ready")
    assert ready.network is not None
    process.send_signal(signal.SIGKILL)
    process.communicate()
    eventually(lambda: gone([process.pid for process in ready.processes]))
    assert ready.network.switch in namespaces()

    down = run("down")

    assert down.stdout == "nothing runs in this directory\n"
    assert ready.network.switch not in namespaces()


EDGE = ("--topology", "edge", "--agents", "2")


def skip_unless_permitted() -> None:
    try:
        check_links("", ())
    except CommandError as error:
        pytest.skip(str(error))


class answering:
    """A server on an agent; gives its port."""

    def __init__(self, cable: Cable) -> None:
        command = [*cable.enter, sys.executable, "-c", SERVE]
        self._serving = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> str:
        assert self._serving.stdout is not None
        return self._serving.stdout.readline().strip()

    def __exit__(self, *_: object) -> None:
        self._serving.kill()
        self._serving.communicate()


def asked(
    network: CableNetwork, port: str, agent: str = "", size: int = 4 * MBIT
) -> tuple[float, float]:
    """Ask the server on the first agent, from another or from here: seconds, and bytes a second."""
    where = network.cable(agent).enter if agent else ()
    command = [*where, sys.executable, "-c", ASK, network.cables[0].address, port, str(size)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    short_s, rate = map(float, done.stdout.split())
    return short_s, rate


def namespaces() -> set[str]:
    return {path.name for path in NAMESPACES.iterdir()} if NAMESPACES.is_dir() else set()


def devices() -> set[str]:
    return {path.name for path in Path("/sys/class/net").iterdir()}


def space_of(pid: int, kind: str) -> int:
    return os.stat(f"/proc/{pid}/ns/{kind}").st_ino
