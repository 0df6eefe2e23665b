"""A host as ``docker compose -f HOST.yaml up`` makes it, for machines without an engine: the same commands, variables,
secrets and mounts, as processes that share an IPC namespace.

    python -m tests.system.topologies.compose_host DIRECTORY HOST
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from moesaic.cluster.parents import die_with
from moesaic.cluster.redis.child import server_programs
from tests.suites import ROOT

# Of a container, variables are those of its image and of the compose file.
IMAGE = ("PATH", "HOME", "LANG", "TMPDIR", "OMP_WAIT_POLICY", "PYTHONDONTWRITEBYTECODE")


def main() -> None:
    """Run the services of a host until SIGTERM or until one ends, each with its log beside the compose file."""
    directory, host = Path(sys.argv[1]), sys.argv[2]
    compose = yaml.safe_load((directory / f"{host}.yaml").read_text("utf-8"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    started = []
    try:
        for name, service in compose["services"].items():
            with (directory / f"{name}.log").open("w") as log:
                started.append(
                    subprocess.Popen(
                        command(directory, compose, name, service),
                        env=environment(directory, compose, name, service),
                        stdout=log,
                        stderr=log,
                        cwd=directory,
                        preexec_fn=die_with(os.getpid()),
                    )
                )
        os.wait()
    finally:
        # As compose does without an order of its own: all of them at once.
        for process in started:
            process.terminate()
        for process in started:
            process.wait()


def command(
    directory: Path, compose: Mapping[str, Any], name: str, service: Mapping[str, Any]
) -> list[str]:
    """The command of a container: its own, or the entry point of the image."""
    if "command" not in service:
        role = service["image"].rpartition("/")[2].partition(":")[0].removeprefix("moesaic-")
        return [sys.executable, "-m", f"moesaic.services.{role.replace('-', '_')}"]
    program, *words = service["command"]
    assert program == "redis-server"
    return [str(server_programs()[0]), *(mounted(directory, compose, service, w) for w in words)]


def environment(
    directory: Path, compose: Mapping[str, Any], name: str, service: Mapping[str, Any]
) -> dict[str, str]:
    """The variables of a container."""
    secrets = directory / f"secrets-of-{name}"
    secrets.mkdir(exist_ok=True)
    for secret in service["secrets"]:
        source, target = (
            (secret, secret) if isinstance(secret, str) else (secret["source"], secret["target"])
        )
        shutil.copyfile(directory / compose["secrets"][source]["file"], secrets / target)
    inherited = {each: os.environ[each] for each in IMAGE if each in os.environ}
    given = {
        variable: mounted(directory, compose, service, value)
        for variable, value in service.get("environment", {}).items()
    }
    library = f"{ROOT / 'libs'}:{ROOT}"
    return inherited | {"PYTHONPATH": library, "MOESAIC_SECRETS_DIR": str(secrets)} | given


def mounted(
    directory: Path, compose: Mapping[str, Any], service: Mapping[str, Any], path: str
) -> str:
    """The path on this machine of one in a container; other words stay as they are."""
    return dict(_mounts(directory, compose, service)).get(path, path)


def _mounts(
    directory: Path, compose: Mapping[str, Any], service: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    for volume in service.get("volumes", []):
        if isinstance(volume, dict):
            assert Path(volume["source"]).is_dir(), volume
            yield volume["target"], volume["source"]
    for config in service.get("configs", []):
        file = directory / compose["configs"][config["source"]]["file"]
        text = file.read_text("utf-8").replace("/data", str(directory))
        own = file.with_suffix(".here")
        own.write_text(text.replace("/run/secrets", str(directory / "secrets")), "utf-8")
        yield config["target"], str(own)


if __name__ == "__main__":
    main()
