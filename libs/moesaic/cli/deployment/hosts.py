"""The description of a cluster that a person writes: its hosts, their addresses, their GPUs and their workers."""

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from moesaic.addresses import is_address, is_everywhere
from moesaic.cli.checks.sizes import read_size
from moesaic.cli.terminal.outcome import CommandError, Exit
from moesaic.loopback import is_loopback
from moesaic.usage.nearest import proposal

Leading = Literal["redis", "scheduler", "gateway"]  # services that compute nothing
LEADING: tuple[Leading, ...] = ("redis", "scheduler", "gateway")
Value = bool | int | float | str
Gpus = tuple[int, ...]
_Table = TypeVar("_Table", bound=msgspec.Struct)
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,30}")
_DIGITS_OF_A_PORT = 90  # workers of a host that ports of two digits tell apart


class Host(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One machine of the cluster.

    Attributes:
        control: its address for Redis, gRPC and metrics.
        data: its address for tensors; empty: ``control``.
        rdma: devices for tensors, as ``UCX_NET_DEVICES`` takes them; empty: none.
        services: of those that compute nothing; None: all on the first host, none on others.
        attention: workers; a number: on the CPU. A list: a GPU each, or several GPUs for tensor parallelism.
        expert: workers; a number: on the CPU. A list: a GPU each.
        edge_agent: the same.
        gpu_memory: of each GPU, such as ``80G``; empty: that of the cluster.
        model: directory of the model there; empty: that of the cluster.
        settings: of services there, by name; they come before those of the cluster.
    """

    control: str
    data: str = ""
    rdma: str = ""
    services: list[Leading] | None = None
    attention: int | list[int | list[int]] = 0
    expert: int | list[int] = 0
    edge_agent: int | list[int] = 0
    gpu_memory: str = ""
    model: str = ""
    settings: dict[str, Value] = {}

    @property
    def workers(self) -> list[tuple[str, Gpus]]:
        """The role and the GPUs of each worker; without GPUs it computes on the CPU."""
        found: list[tuple[str, Gpus]] = []
        roles = (
            ("attention", self.attention),
            ("expert", self.expert),
            ("edge-agent", self.edge_agent),
        )
        for role, given in roles:
            if isinstance(given, int):
                found += [(role, ())] * given
            else:
                found += [(role, (gpu,) if isinstance(gpu, int) else tuple(gpu)) for gpu in given]
        return found

    @property
    def gpus(self) -> list[int]:
        """All GPUs of its workers, in order, as ``nvidia-smi`` counts them."""
        return sorted({gpu for _, gpus in self.workers for gpu in gpus})


class HostsFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The cluster.

    Attributes:
        model: directory of the model on every host; this machine reads its ``config.json``.
        hosts: by name.
        publish: address and port of the REST API, on hosts with a gateway.
        gpu_memory: of each GPU, such as ``80G``; empty: workers find out when they start.
        images: what stands before the names of the images, such as ``registry.example/lab/``.
        tag: of the images.
        source: directory of a clone on every host, to build the images from; empty: they are there.
        settings: of all services that have them, by name.
    """

    model: str
    hosts: dict[str, Host]
    publish: str = "127.0.0.1:8000"
    gpu_memory: str = ""
    images: str = ""
    tag: str = "dev"
    source: str = ""
    settings: dict[str, Value] = {}

    def leading(self, name: str) -> list[Leading]:
        """List the services of a host that compute nothing."""
        host = self.hosts[name]
        if host.services is not None:
            return host.services
        nobody_says = all(each.services is None for each in self.hosts.values())
        return [*LEADING] if nobody_says and name == next(iter(self.hosts)) else []

    @property
    def redis_address(self) -> str:
        """The address of the host that runs Redis."""
        return next(
            host.control for name, host in self.hosts.items() if "redis" in self.leading(name)
        )

    @property
    def roles(self) -> set[str]:
        """The roles of all workers."""
        return {role for host in self.hosts.values() for role, _ in host.workers}

    def memory_of(self, name: str) -> int:
        """Count the bytes of each GPU of a host; 0: unknown."""
        text = self.hosts[name].gpu_memory or self.gpu_memory
        return read_size("gpu_memory", text) if text else 0


def read_hosts(path: Path) -> HostsFile:
    """Read and check a description.

    Raises:
        CommandError: it cannot be read, or one line for each field that is wrong.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"--hosts {path}: {error}", Exit.USAGE) from error
    except tomllib.TOMLDecodeError as error:
        raise CommandError(f"{path}: {error}; it must be a TOML file", Exit.USAGE) from error
    tables, problems = raw.get("hosts"), list[str]()
    if isinstance(tables, dict):
        raw["hosts"] = {
            name: found
            for name, table in tables.items()
            if (found := _converted(table, Host, f"hosts.{name}", problems))
        }
    cluster = _converted(raw, HostsFile, "", problems)
    if cluster and not problems:
        problems = [*_problems(cluster)]
    if problems or not cluster:
        raise CommandError("\n".join(f"{path}: {problem}" for problem in problems), Exit.USAGE)
    return cluster


def _converted(table: object, kind: type[_Table], where: str, problems: list[str]) -> _Table | None:
    """Read a table; None: something is wrong with it, and a line about that has been added to ``problems``."""
    try:
        return msgspec.convert(table, kind, from_attributes=True)
    except msgspec.ValidationError as error:
        text, _, place = str(error).partition(" - at `$")
        text = text[:1].lower() + text[1:]
        if unknown := re.search(r"unknown field `(\w+)`", text):
            text += proposal(unknown[1], kind.__struct_fields__)
        place = where + place.rstrip("`").replace("[...]", "")
        problems.append(f"{place.lstrip('.') or 'the file'}: {text}")
    return None


def _problems(cluster: HostsFile) -> Iterator[str]:
    if not cluster.hosts:
        yield "hosts: there is none; add a table [hosts.NAME] with its control address"
        return
    for name, host in cluster.hosts.items():
        if not host.workers and not cluster.leading(name):
            yield f"hosts.{name}: nothing runs there; give it workers or services, or leave it out"
        for problem in (*_of_addresses(host), *_of_workers(host)):
            yield f"hosts.{name}.{problem}"
        if not _NAME.fullmatch(name):
            yield f"hosts.{name}: a name has lower-case letters, digits and hyphens, 31 at most"
    yield from _of_memory(cluster)
    yield from _of_roles(cluster)
    yield from _of_the_same(
        {f"hosts.{name}.control": host.control for name, host in cluster.hosts.items()}
    )
    address, _, port = cluster.publish.rpartition(":")
    if not is_address(address.strip("[]")) or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        yield f"publish: must be an IP address and a port, such as 0.0.0.0:8000, got {cluster.publish!r}"


def _of_addresses(host: Host) -> Iterator[str]:
    for field, address in (("control", host.control), ("data", host.data)):
        usable = is_address(address) and not is_everywhere(address) and not is_loopback(address)
        if not usable and (address or field == "control"):
            yield f"{field}: must be an IP address of the host that the others reach, got {address!r}"


def _of_workers(host: Host) -> Iterator[str]:
    if len(host.workers) > _DIGITS_OF_A_PORT:
        yield f"attention, expert, edge_agent: at most {_DIGITS_OF_A_PORT} workers a host, got {len(host.workers)}"
    for field in ("attention", "expert", "edge_agent"):
        given = getattr(host, field)
        if isinstance(given, int) and given < 0:
            yield f"{field}: must be a number of workers on the CPU, or a list of GPUs, got {given}"
    kinds = {bool(gpus) for _, gpus in host.workers}
    if len(kinds) > 1:
        yield "attention, expert: give GPUs to all workers of the host, or to none"
    for role, gpus in host.workers:
        field = role.replace("-", "_")
        if any(gpu < 0 for gpu in gpus) or len(set(gpus)) < len(gpus):
            yield f"{field}: a GPU is a number of 'nvidia-smi -L', each once a worker, got {list(gpus)}"
    yield from _of_tensor_parallel(host)
    for gpu in host.gpus:
        roles = [role for role, gpus in host.workers if gpu in gpus]
        for role in dict.fromkeys(roles):
            if roles.count(role) > 1:
                yield f"{role.replace('-', '_')}: GPU {gpu} is named {roles.count(role)} times; name it once"
    if host.rdma and not host.data:
        yield "data: give the address of the RDMA network, because rdma is set"


def _of_tensor_parallel(host: Host) -> Iterator[str]:
    for _, gpus in host.workers:
        if len(gpus) < 2:
            continue
        first = host.gpus.index(gpus[0])
        if list(gpus) != host.gpus[first : first + len(gpus)]:
            yield f"attention: {list(gpus)}: the GPUs of one worker must be neighbours in ascending order"
        if sum(bool({*gpus} & {*others}) for _, others in host.workers) > 1:
            yield f"attention: {list(gpus)}: no other worker may have GPUs of a worker with several"


def _of_memory(cluster: HostsFile) -> Iterator[str]:
    for name in cluster.hosts:
        try:
            cluster.memory_of(name)
        except CommandError as error:
            yield f"hosts.{name}: {error}"


def _of_roles(cluster: HostsFile) -> Iterator[str]:
    counts = {
        each: sum(each in cluster.leading(name) for name in cluster.hosts) for each in LEADING
    }
    if counts["redis"] != 1:
        yield f"services: redis must be on exactly one host, got {counts['redis']}"
    for service in ("scheduler", "gateway"):
        if not counts[service]:
            yield f"services: {service} is on no host; add it to the services of one"
    if not cluster.roles & {"attention", "edge-agent"}:
        yield "attention: no host has an attention worker; give one host attention = [0], or = 1 for a CPU"
    if "edge-agent" in cluster.roles and len(cluster.roles) > 1:
        yield "edge_agent: edge agents hold their own experts; leave attention and expert out, or edge_agent"


def _of_the_same(addresses: Mapping[str, str]) -> Iterator[str]:
    homes: dict[str, str] = {}
    for field, address in addresses.items():
        if address in homes:
            yield f"{field}: {address} is the address of {homes[address]} already; each host needs its own"
        homes.setdefault(address, field)
