"""The settings of a cluster's services, checked as the services themselves check them at their start."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from pydantic import ValidationError

from moesaic.cli.deployment.hosts import HostsFile
from moesaic.cli.deployment.services import HostService
from moesaic.errors import UnusableSettings
from moesaic.models.configuration.config import ModelConfig
from moesaic.models.configuration.division import divide
from moesaic.usage.names import ROLES, settings_model
from moesaic.usage.nearest import proposal
from moesaic.usage.reading import problems_of

if TYPE_CHECKING:
    from moesaic.settings import ServiceSettings

# Settings that the addresses, the GPUs and the numbers of workers decide.
ITS_OWN = {
    *("worker_id", "host", "port", "control_host", "advertise_host", "admin_port", "metrics_port"),
    *("data_host", "data_port", "weights_port", "node", "model", "device", "dispatch", "share"),
    *("tensor_parallel", "tensor_parallel_rank", "tensor_parallel_address"),
}
NO_ENVIRONMENT = "MOESAIC_OF_NOBODY_"  # the variables of this process are none of the cluster's


def problems_of_settings(cluster: HostsFile) -> Iterator[str]:
    """Write one line for each setting of the description that no service has, or that is decided elsewhere."""
    by_role = {role: settings_model(role).model_fields for role in ROLES}
    known = {name for fields in by_role.values() for name in fields}
    secret = {
        n for fields in by_role.values() for n, f in fields.items() if "Secret" in str(f.annotation)
    }
    places = {"settings": cluster.settings}
    places |= {f"hosts.{name}.settings": host.settings for name, host in cluster.hosts.items()}
    for place, given in places.items():
        for name in given:
            if name in secret or name == "redis_url":
                yield f"{place}.{name}: secrets are files that this command makes; leave it out"
            elif name in ITS_OWN:
                yield f"{place}.{name}: this command sets it from the hosts' addresses and GPUs; leave it out"
            elif name not in known:
                yield f"{place}.{name}: unknown setting{proposal(name, known - ITS_OWN - secret)}"


def checked(services: Iterable[HostService]) -> tuple[dict[str, "ServiceSettings"], list[str]]:
    """Make the settings of every service.

    Returns:
        The settings by worker id, and one line for each value that is wrong.
    """
    found: dict[str, ServiceSettings] = {}
    problems: dict[str, None] = {}  # in order, each once: workers of a kind have the same settings
    for service in services:
        if service.role == "redis":
            continue
        try:
            settings = settings_model(service.role)(
                _env_prefix=NO_ENVIRONMENT, **dict(service.settings)
            )
            found[service.worker_id] = settings
        except ValidationError as error:
            lines = (f"hosts.{service.host}: {service.role}: {line}" for line in problems_of(error))
            problems |= dict.fromkeys(lines)
    return found, list(problems)


def problems_of_ports(services: Iterable[HostService], redis_port: int) -> Iterator[str]:
    """Write one line for each port that two services of a host have."""
    taken: dict[tuple[str, int], str] = {}
    for service in services:
        own = [int(value) for name, value in service.settings.items() if name.endswith("port")]
        for port in own if service.role != "redis" else [redis_port]:
            other = taken.setdefault((service.host, port), service.name)
            if other != service.name:
                yield f"publish: port {port} of host {service.host} is that of {other} already; give another"


def problems_of_threads(cluster: HostsFile) -> Iterator[str]:
    """Write one line for each host whose CPU is shared by workers that would all take every core."""
    for name, host in cluster.hosts.items():
        given = cluster.settings | host.settings
        if not host.gpus and len(host.workers) > 1 and not given.get("threads"):
            count = len(host.workers)
            yield (
                f"hosts.{name}.settings.threads: {count} workers share the CPU; give the threads of each, such as the "
                f"number of cores divided by {count}"
            )


def problems_of_ranks(services: Iterable[HostService], config: ModelConfig) -> Iterator[str]:
    """Write one line for each worker with more GPUs than the model can be divided among."""
    for service in services:
        try:
            divide(config, 0, max(1, len(service.gpus)))
        except UnusableSettings as error:
            yield f"hosts.{service.host}.{service.role}: {error.fix}"
