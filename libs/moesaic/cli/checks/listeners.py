"""Every socket of a running suite that others can reach: who may speak there, and what proves it."""

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import psutil

from moesaic.cli.clients.fleet import service_facts
from moesaic.cli.machine.sockets import OpenSocket, open_sockets
from moesaic.cli.machine.state import ProcessState, SuiteState
from moesaic.loopback import is_loopback
from moesaic.usage.variables import ENV_PREFIX

UNKNOWN = "unknown"


class Kind(msgspec.Struct, frozen=True):
    """A kind of listeners, as the table in SECURITY.md has it."""

    protocol: str
    address: str
    speakers: str
    proof: str


KINDS: Mapping[str, Kind] = {
    "REST": Kind(
        "HTTP; HTTPS with `--ssl-certfile`",
        "`--host` and `--port` of the gateway; also `--console-host` and `--console-port`",
        "clients",
        "an API key; with `--ssl-cert-reqs 2` also a certificate; without keys the gateway listens on loopback only, "
        "and refuses web pages of other sites",
    ),
    "gRPC": Kind(
        "gRPC",
        "`--control-host`",
        "services, operators",
        "a token made from the cluster's secret; with certificates these too",
    ),
    "metrics": Kind("HTTP", "`--control-host`", "Prometheus", "nothing: it reads numbers"),
    "tensors": Kind(
        "frames over TCP",
        "`--data-host`",
        "workers",
        "challenge and response with the cluster's secret",
    ),
    "meeting of rings": Kind(
        "Unix socket",
        "a random name, for the length of a handshake",
        "workers of this host",
        "a token of their session",
    ),
    "Redis": Kind(
        "RESP",
        "a Unix socket in `run/`; in containers the network `control`",
        "services",
        "the rights of the directory; in containers a password for each role",
    ),
    "ranks": Kind(
        "gloo, NCCL",
        "loopback; the network of `--tensor-parallel-address`",
        "ranks of one worker",
        "nothing, and gloo keeps what connects: keep the network to the ranks",
    ),
    "meeting of ranks": Kind(
        "gRPC",
        "`--tensor-parallel-address`",
        "ranks on other machines",
        "a token made from the cluster's secret",
    ),
    "UCX": Kind(
        "UCX",
        "loopback, with `--transports tcp` or GPUs; abstract Unix sockets, with `--transports shm`; `--data-host`, "
        "with `--private-network`; RDMA devices that `UCX_NET_DEVICES` names",
        "workers",
        "nothing: keep the network to the workers",
    ),
}


class Listener(msgspec.Struct, frozen=True, kw_only=True):
    """A socket that others can send to."""

    process: str
    pid: int
    kind: str  # of KINDS, or UNKNOWN
    address: str
    loopback: bool  # only this machine reaches it


def row_of(listener: Listener) -> tuple[str, str, str, str, str]:
    """Give what the table of a running suite says of a listener, behind the process."""
    kind = KINDS.get(listener.kind, Kind(UNKNOWN, "", UNKNOWN, UNKNOWN))
    return listener.kind, kind.protocol, listener.address, kind.speakers, kind.proof


def listeners_of(suite: SuiteState) -> list[Listener]:
    """List the listeners of all processes of a suite, those of its supervisor and of ranks too."""
    facts = asyncio.run(_facts(suite))
    found = [
        Listener(process=name, pid=pid, kind=kind, address=each.address, loopback=_is_local(each))
        for name, pid, kind, each in _found(suite, facts)
        if each.listens
    ]
    return sorted(found, key=lambda each: (each.process, each.pid, each.kind, each.address))


async def _facts(suite: SuiteState) -> dict[str, dict[str, object]]:
    asked = [process for process in suite.processes if process.admin_address]
    answers = await asyncio.gather(
        *(service_facts(each.role, each.name, each.admin_address) for each in asked)
    )
    return {process.name: facts for process, facts in zip(asked, answers, strict=True)}


def _found(
    suite: SuiteState, facts: Mapping[str, Mapping[str, object]]
) -> Iterator[tuple[str, int, str, OpenSocket]]:
    own = {process.pid for process in suite.processes}
    for process in suite.processes:
        known = _known(process, suite.url, facts.get(process.name, {}))
        children = _children(process.pid) - own
        rest = _kind_of_the_rest(process, children)
        for pid in [process.pid, *sorted(children)]:
            for each in open_sockets(pid):
                yield process.name, pid, _kind(each, known, rest), each
    for each in open_sockets(suite.pid):
        yield "moesaic up", suite.pid, UNKNOWN, each


def _known(process: ProcessState, url: str, facts: Mapping[str, object]) -> dict[str, str]:
    """The kinds of addresses that a process tells of."""
    told = _told(process.pid, "tensor_parallel_address")
    known = {
        process.admin_address: "gRPC",
        process.metrics_address: "metrics",
        str(facts.get("data_address", "")): "tensors",
        str(facts.get("weights_address", "")): "tensors",
        told: "meeting of ranks",
    }
    if process.role == "gateway":
        known[url.rpartition("//")[2]] = "REST"
        if port := _told(process.pid, "console_port"):
            host = _told(process.pid, "console_host") or "127.0.0.1"
            known[f"{host}:{port}"] = "REST"
    return known


def _kind_of_the_rest(process: ProcessState, children: set[int]) -> str:
    """The kind of what a process opens without telling its address."""
    if process.role == "redis":
        return "Redis"
    if process.role == "attention" and (children or _told(process.pid, "tensor_parallel_address")):
        return "ranks"
    transports = _told(process.pid, "transports")
    with_ucx = transports in ("tcp", "shm") or _told(process.pid, "private_network")
    if with_ucx or _told(process.pid, "device").startswith("cuda"):
        return "UCX"
    return UNKNOWN


def _kind(each: OpenSocket, known: Mapping[str, str], rest: str) -> str:
    if each.protocol == "unix":
        return "meeting of rings" if each.address.startswith("@moesaic-") else rest
    return known.get(each.address, rest) if each.protocol == "tcp" else UNKNOWN


def _is_local(each: OpenSocket) -> bool:
    return each.protocol == "unix" or is_loopback(each.address.rpartition(":")[0].strip("[]"))


def _children(pid: int) -> set[int]:
    try:
        return {child.pid for child in psutil.Process(pid).children(recursive=True)}
    except psutil.Error:
        return set()


def _told(pid: int, setting: str) -> str:
    """A setting as a process was told it, by flag or variable; empty: it was not."""
    flag, variable = f"--{setting.replace('_', '-')}", ENV_PREFIX + setting.upper()
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
        variables = Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
    except OSError:
        return ""
    for at, argument in enumerate(arguments):
        if argument == flag:
            following = arguments[at + 1] if at + 1 < len(arguments) else ""
            return "true" if following.startswith("--") or not following else following
        if argument.startswith(f"{flag}="):
            return argument.partition("=")[2]
    prefix = f"{variable}="
    return next((each[len(prefix) :] for each in variables if each.startswith(prefix)), "")
