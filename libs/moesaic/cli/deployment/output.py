"""The files of a cluster: a directory for each host, with its compose file and the secrets of its services."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moesaic.addresses import host_port
from moesaic.cli.deployment.compose_file import REDIS_PORT, as_yaml, compose_of
from moesaic.cli.deployment.hosts import HostsFile
from moesaic.cli.deployment.secret_files import REDIS, make
from moesaic.cli.deployment.services import HostService
from moesaic.cli.terminal.outcome import CommandError, Exit, using

MASTER = "secrets"  # all secrets of the cluster; hosts get copies of those that they need
REDIS_CONF = Path(__file__).with_name("redis.conf")
CHECK_S = 60
_HEAD = """\
# Host {host} of a cluster of Moesaic, written by 'moesaic deploy compose'. To change it, change the description of the
# hosts and write it again. Copy this directory to the host, and start its services there:
#
#   docker compose -f {host}.yaml up -d
"""


def write(cluster: HostsFile, services: list[HostService], output: Path) -> dict[str, Any]:
    """Write the directories of all hosts; each replaces its predecessor as a whole.

    Args:
        cluster: checked.
        services: of all hosts.
        output: made if it is not there.

    Returns:
        The contents of the compose files, by host.

    Raises:
        CommandError: a directory cannot be written, is somebody else's, or ``docker compose`` refuses a file.
    """
    contents = {
        name: compose_of(cluster, name, [each for each in services if each.host == name])
        for name in cluster.hosts
    }
    with using(f"--output {output}"):
        for name in contents:
            _check_own(output / name, name)
        make(output / MASTER)
        with tempfile.TemporaryDirectory(prefix=".new-", dir=output) as made:
            for name, compose in contents.items():
                _write_host(Path(made), name, compose, output / MASTER, cluster.redis_address)
                _check_by_compose(Path(made, name, f"{name}.yaml"))
            for name in contents:
                shutil.rmtree(output / name, ignore_errors=True)
                Path(made, name).rename(output / name)
    return contents


def _check_own(directory: Path, name: str) -> None:
    """Make sure that a directory may be replaced.

    Raises:
        CommandError: it is none that this command has written, or that of all secrets.
    """
    if name == MASTER:
        raise CommandError(
            f"hosts.{MASTER}: the directory of this name has the secrets of the cluster; give the host another name",
            Exit.USAGE,
        )
    if directory.exists() and not (directory / f"{name}.yaml").exists():
        raise CommandError(
            f"--output: {directory} is there already, and this command has not written it; name another directory, or "
            "remove it",
            Exit.USAGE,
        )


def _write_host(
    parent: Path, name: str, compose: Mapping[str, Any], master: Path, redis: str
) -> None:
    directory = parent / name
    (directory / MASTER).mkdir(parents=True)
    for path in (directory, directory / MASTER):
        # Other users of the host may not read secrets.
        path.chmod(0o700)
    (directory / f"{name}.yaml").write_text(_HEAD.format(host=name) + as_yaml(compose), "utf-8")
    if "configs" in compose:
        shutil.copyfile(REDIS_CONF, directory / "redis.conf")
    for secret in compose["secrets"]:
        text = (master / secret).read_text("utf-8")
        copy = directory / MASTER / secret
        copy.write_text(text.replace(f"@{REDIS}", f"@{host_port(redis, REDIS_PORT)}/0"), "utf-8")
        # Containers run as another user.
        copy.chmod(0o444)


def _check_by_compose(file: Path) -> None:
    """Let ``docker compose`` read a file, where it is installed; it needs no engine for that.

    Raises:
        CommandError: it refuses the file.
    """
    if not compose_is_there():
        return
    done = _compose("-f", file.name, "config", "-q", cwd=file.parent)
    if done.returncode:
        raise CommandError(f"docker compose refuses {file.name}: {done.stderr.strip()}")


def compose_is_there() -> bool:
    """Tell whether this machine has ``docker compose``."""
    return shutil.which("docker") is not None and not _compose("version").returncode


def _compose(*arguments: str, cwd: Path | None = None) -> "subprocess.CompletedProcess[str]":
    """Run ``docker compose`` without the variables that name files or projects; raises ``CommandError``."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("COMPOSE_")}
    command = ["docker", "compose", *arguments]
    try:
        return subprocess.run(
            command,
            cwd=cwd,
            env=clean,
            capture_output=True,
            text=True,
            timeout=CHECK_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise CommandError(f"{' '.join(command)}: no answer in {CHECK_S} s") from error
