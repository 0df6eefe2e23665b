"""A suite of real processes to measure, started as a user starts one and stopped at the end."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moesaic.cli.machine.links.cables import set_rate
from moesaic.cli.machine.state import RUN_DIRECTORY, StateFile
from moesaic.cluster.redis.child import start_redis
from moesaic.cluster.security.credentials import Credentials, using

DEMO = Path(__file__).parents[2] / "models" / "demo"
START_S = 600


@dataclass(frozen=True)
class RunningSuite:
    """Addresses of the parts of a running suite."""

    directory: Path
    redis_url: str
    port: int
    processes: Mapping[str, Mapping[str, Any]]  # by name: pid, admin_address, metrics_address, ...

    @property
    def attention_address(self) -> str:
        """gRPC address of the first attention worker."""
        return str(self.processes["attention-0"]["admin_address"])

    def set_link_rate(self, bit_per_s: int) -> None:
        """Hold the links of its agents to another rate from now on, each way."""
        state = StateFile(self.directory / RUN_DIRECTORY).running()
        assert state is not None
        assert state.network is not None
        set_rate(state.network, bit_per_s)


@contextmanager
def running_suite(*flags: str, **settings: str) -> Iterator[RunningSuite]:
    """Run ``moesaic up`` with these flags and settings of services, in a directory and with a Redis of its own."""
    with tempfile.TemporaryDirectory(prefix="moesaic-bench-") as name:
        directory = Path(name)
        redis, redis_url = start_redis(directory / "redis")
        environment = {**clean_environment(), **settings, "REDIS_URL": redis_url}
        try:
            up = ["up", "--detach", "--json", "--model", str(DEMO), "--port", "0", *flags]
            started = json.loads(_moesaic(directory, environment, *up))
            secret = (directory / "run/secret").read_bytes().strip()
            try:
                with using(Credentials(secret)):
                    yield RunningSuite(
                        directory,
                        redis_url,
                        int(started["url"].rsplit(":", 1)[1]),
                        {process["name"]: process for process in started["processes"]},
                    )
            finally:
                _moesaic(directory, environment, "down")
        finally:
            redis.terminate()
            redis.wait()


def _moesaic(directory: Path, environment: Mapping[str, str], *arguments: str) -> str:
    command = [sys.executable, "-m", "moesaic.cli", *arguments]
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=START_S
    )
    if done.returncode:
        raise RuntimeError(f"moesaic {arguments[0]}: {done.stdout}{done.stderr}")
    return done.stdout


def clean_environment() -> dict[str, str]:
    """This process's environment without the variables that would change the services measured."""
    return {name: value for name, value in os.environ.items() if not name.startswith("MOESAIC_")}
