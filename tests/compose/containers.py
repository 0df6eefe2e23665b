"""A compose project of the suite, seen and disturbed by an operator with the docker command."""

import json
import os
import subprocess
from dataclasses import dataclass
from typing import Any

import httpx

from tests.suites import ROOT
from tests.waiting import HANG_S, eventually


def docker(
    *arguments: str,
    env: dict[str, str] | None = None,
    check: bool = True,
    hang_s: float = HANG_S,
) -> str:
    """The standard output of a docker command, which fails as hung after ``hang_s`` seconds."""
    done = subprocess.run(
        ["docker", *arguments],
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=hang_s,
        check=False,
    )
    assert not check or done.returncode == 0, f"docker {arguments}: {done.stdout}{done.stderr}"
    return done.stdout + ("" if check else done.stderr)


def logs(container: str) -> str:
    """Return the output of a container so far."""
    command = ["docker", "logs", container]
    return subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True
    ).stdout


def secret(name: str) -> str:
    """One of the secrets that compose hands out."""
    return (ROOT / "deploy/secrets" / name).read_text(encoding="utf-8").strip()


@dataclass(frozen=True)
class Containers:
    """A compose project."""

    project: str
    port: int
    profile: str = "disaggregated"

    def compose(self, *arguments: str, check: bool = True) -> str:
        """Run a docker compose command on the project."""
        options = ("compose", "-p", self.project, "--profile", self.profile)
        return docker(*options, *arguments, env={"MOESAIC_PORT": str(self.port)}, check=check)

    def client(self) -> httpx.Client:
        """A client of the published port."""
        headers = {"Authorization": f"Bearer {secret('api_key')}"}
        url = f"http://127.0.0.1:{self.port}"
        return httpx.Client(base_url=url, headers=headers, timeout=HANG_S)

    def until_ready(self) -> None:
        """Wait until the gateway takes requests and every container runs and is healthy."""
        eventually(self.ready)

    def ready(self) -> bool:
        """Check whether the gateway takes requests and every container is healthy."""
        states = [(c["State"], c["Health"]) for c in self.containers()]
        return self.answers() and set(states) == {("running", "healthy")}

    def answers(self) -> bool:
        """Check whether the gateway says that it takes requests."""
        try:
            with self.client() as client:
                return client.get("/readyz").status_code == 200
        except httpx.HTTPError:
            return False

    def containers(self) -> list[dict[str, Any]]:
        """All of the project's containers, as ``docker compose ps`` shows them."""
        return [
            json.loads(line)
            for line in self.compose("ps", "-a", "--format", "json").split("\n")
            if line
        ]

    def names(self, service: str) -> list[str]:
        """The containers of a service."""
        return sorted(c["Name"] for c in self.containers() if c["Service"] == service)

    def starts(self) -> dict[str, str]:
        """Return the time at which each container was last started."""
        names = [c["Name"] for c in self.containers()]
        lines = docker("inspect", "-f", "{{.Name}} {{.State.StartedAt}}", *names).split("\n")
        return {line.split()[0].lstrip("/"): line.split()[1] for line in lines if line}

    def events(self, service: str, event: str) -> list[dict[str, Any]]:
        """Return a service's log entries under a name."""
        lines = [line for name in self.names(service) for line in logs(name).split("\n")]
        logged = [json.loads(line) for line in lines if line.startswith("{")]
        return [entry for entry in logged if entry["event"] == event]

    def until_placed(self, workers: int) -> None:
        """Wait until the placement in force has so many expert workers."""

        def placed() -> bool:
            committed = self.events("scheduler", "placement.committed")  # before what was planned
            planned = self.events("scheduler", "placement.planned")
            workers_of = {entry["epoch"]: entry["workers"] for entry in planned}
            return bool(committed) and len(workers_of[committed[-1]["epoch"]]) == workers

        eventually(placed)

    def disconnect(self, container: str, network: str) -> None:
        """Cut a container off a network."""
        docker("network", "disconnect", "-f", f"{self.project}_{network}", container)

    def connect(self, container: str, service: str, network: str) -> None:
        """Bring a container back into a network, under the names it has there."""
        aliases = ("--alias", service, "--alias", f"{service}.{network}")
        docker("network", "connect", *aliases, f"{self.project}_{network}", container)

    def down(self) -> None:
        """Remove the project with its volume and networks."""
        self.compose("down", "-v", "--remove-orphans", "-t", "20")
