"""The services of each host of a cluster, with all their settings; pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from moesaic.cli.deployment.hosts import Gpus, HostsFile, Value
from moesaic.usage.names import settings_model
from moesaic.usage.variables import ENV_PREFIX

# The last digits of the ports 70xx, 71xx, 72xx and 90xx of a host's services.
PORTS = {"scheduler": 0, "gateway": 1}
FIRST_WORKER = 10
THREADS_BESIDE_A_GPU = 4  # the CPU reads weights and adds up the answers of experts


@dataclass(frozen=True)
class HostService:
    """One service of a host.

    Attributes:
        host: its name.
        name: of the service on that host.
        role: of the service; ``redis`` has no settings.
        settings: by field, of the service alone and of the cluster.
        gpus: of a worker, as positions among the GPUs that the host's workers see.
    """

    host: str
    name: str
    role: str
    settings: Mapping[str, Value]
    gpus: Gpus = ()

    @property
    def environment(self) -> dict[str, str]:
        """The settings as variables."""
        return {
            f"{ENV_PREFIX}{name.upper()}": _text(value) for name, value in self.settings.items()
        }

    @property
    def worker_id(self) -> str:
        """The name under which it registers."""
        return str(self.settings["worker_id"])

    @property
    def worker(self) -> bool:
        """True if it computes."""
        return self.role in ("attention", "expert", "edge-agent")


def services_of(
    cluster: HostsFile, computed: Mapping[str, Mapping[str, Value]] | None = None
) -> list[HostService]:
    """List the services of all hosts.

    Args:
        cluster: checked.
        computed: settings of workers by worker id, which come behind those of the description.
    """
    return [each for name in cluster.hosts for each in _on_host(cluster, name, computed or {})]


def _on_host(
    cluster: HostsFile, host: str, computed: Mapping[str, Mapping[str, Value]]
) -> Iterator[HostService]:
    control = cluster.hosts[host].control
    for service in cluster.leading(host):
        if service == "redis":
            yield HostService(host, service, service, {})
            continue
        own: dict[str, Value] = {
            "worker_id": f"{service}-{host}",
            "host": "127.0.0.1",
            "control_host": control,
            **_ports(PORTS[service], "admin", "metrics"),
        }
        if service == "gateway":
            address, _, port = cluster.publish.rpartition(":")
            own |= {"host": address.strip("[]"), "port": int(port), "model": "/model"}
            own |= {"served_model_name": PurePosixPath(_model_of(cluster, host)).name}
        settings = _with_given(cluster, host, service, own)
        yield HostService(host, service, service, settings)
    counts: dict[str, int] = {}
    for place, (role, gpus) in enumerate(cluster.hosts[host].workers):
        number = counts[role] = counts.get(role, -1) + 1
        worker_id = f"{role}-{host}-{number}"
        seen = tuple(cluster.hosts[host].gpus.index(gpu) for gpu in gpus)
        own = {"worker_id": worker_id, **_of_worker(cluster, host, role, seen)}
        own |= _ports(FIRST_WORKER + place, "admin", "data", "metrics")
        own |= _ports(FIRST_WORKER + place, "weights") if role != "attention" else {}
        own |= computed.get(worker_id, {})
        settings = _with_given(cluster, host, role, own)
        yield HostService(host, f"{role}-{number}", role, settings, seen)


def _of_worker(cluster: HostsFile, host: str, role: str, gpus: Gpus) -> dict[str, Value]:
    own: dict[str, Value] = {
        "host": "127.0.0.1",
        "control_host": cluster.hosts[host].control,
        "data_host": cluster.hosts[host].data or cluster.hosts[host].control,
        "node": host,
        "model": "/model",
    }
    # All workers hold the same weights.
    if any(each.gpus for each in cluster.hosts.values()):
        own["dtype"] = "bfloat16"
    if gpus:
        own |= {"device": f"cuda:{gpus[0]}", "threads": THREADS_BESIDE_A_GPU}
    if role == "attention":
        own["dispatch"] = "routed" if "expert" in cluster.roles else "local"
        own |= {"tensor_parallel": len(gpus)} if len(gpus) > 1 else {}
    return own


def _ports(number: int, *kinds: str) -> dict[str, Value]:
    first = {"admin": 7000, "data": 7100, "weights": 7200, "metrics": 9000}
    return {f"{kind}_port": first[kind] + number for kind in kinds}


def _with_given(
    cluster: HostsFile, host: str, role: str, own: Mapping[str, Value]
) -> dict[str, Value]:
    """Add the settings of the description that a service of this role has."""
    known = settings_model(role).model_fields
    given = cluster.settings | cluster.hosts[host].settings
    return {**own, **{name: value for name, value in given.items() if name in known}}


def _model_of(cluster: HostsFile, host: str) -> str:
    return cluster.hosts[host].model or cluster.model


def _text(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
