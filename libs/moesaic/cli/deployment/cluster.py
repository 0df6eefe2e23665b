"""A cluster from its description to its files."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesaic.cli.deployment.checks import (
    checked,
    problems_of_ports,
    problems_of_ranks,
    problems_of_settings,
    problems_of_threads,
)
from moesaic.cli.deployment.compose_file import REDIS_PORT
from moesaic.cli.deployment.hosts import HostsFile, read_hosts
from moesaic.cli.deployment.memory import computed_settings
from moesaic.cli.deployment.output import write
from moesaic.cli.deployment.services import HostService, services_of
from moesaic.cli.terminal.outcome import CommandError, Exit

if TYPE_CHECKING:
    from moesaic.models.configuration.config import ModelConfig
    from moesaic.settings import ServiceSettings


def deploy(hosts: Path, output: Path) -> tuple[list[HostService], dict[str, Any]]:
    """Write the files of all hosts.

    Args:
        hosts: the description, a TOML file.
        output: directory to write to.

    Returns:
        The services of all hosts, and the contents of the compose files by host.

    Raises:
        CommandError: one line for each thing that is wrong; nothing has been written then.
    """
    cluster = read_hosts(hosts)
    services = planned(hosts, cluster)
    return services, write(cluster, services, output)


def planned(hosts: Path, cluster: HostsFile) -> list[HostService]:
    """List the services of all hosts, with slots and KV for their memory.

    Raises:
        CommandError: one line for each thing that is wrong.
    """
    _refuse(hosts, [*problems_of_settings(cluster), *problems_of_threads(cluster)])
    services = services_of(cluster)
    settings, problems = checked(services)
    _refuse(hosts, [*problems, *problems_of_ports(services, REDIS_PORT)])
    with _naming(hosts):
        config = _config(cluster, services, settings)
    _refuse(hosts, [*problems_of_ranks(services, config)])
    with _naming(hosts):
        computed = computed_settings(cluster, services, settings, config)
    services = services_of(cluster, computed)
    _refuse(hosts, checked(services)[1])
    return services


def _config(
    cluster: HostsFile, services: list[HostService], settings: "Mapping[str, ServiceSettings]"
) -> "ModelConfig":
    """Read the configuration of the model, which must be on this machine, with the context that gateways allow."""
    from moesaic.errors import CheckpointError, UnusableSettings
    from moesaic.models.configuration.config import load_config
    from moesaic.models.configuration.context import with_context

    places = [cluster.model, *(host.model for host in cluster.hosts.values() if host.model)]
    found = [Path(place) for place in places if (Path(place) / "config.json").is_file()]
    if not found:
        raise CommandError(
            f"model: {cluster.model} has no config.json on this machine; run this where the model is, or copy its "
            "config.json to the same place here",
            Exit.USAGE,
        )
    gateway = next(each for each in services if each.role == "gateway")
    length = getattr(settings[gateway.worker_id], "max_model_len", 0)
    try:
        return with_context(load_config(found[0]), length)
    except (CheckpointError, UnusableSettings) as error:
        raise CommandError(f"model: {error}", Exit.USAGE) from error


@contextmanager
def _naming(hosts: Path) -> Iterator[None]:
    try:
        yield
    except CommandError as error:
        raise CommandError(f"{hosts}: {error}", error.status) from error


def _refuse(hosts: Path, problems: list[str]) -> None:
    if problems:
        raise CommandError("\n".join(f"{hosts}: {problem}" for problem in problems), Exit.USAGE)
