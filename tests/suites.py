"""Starts whole suites of real processes as a user starts them, for tests.

Also where the project is not installed: tests of other people's clients have an environment of their own, without
gRPC. So what makes calls is imported when it is asked for.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import httpx

from tests.waiting import HANG_S, eventually

if TYPE_CHECKING:
    import grpc

    from moesaic.cluster.security.credentials import Credentials

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "models" / "demo"
CLINC_DOMAIN = ROOT / "models/training/data/classification/clinc_domain.test.jsonl.gz"
STORY_LINES = 20
SERVED_PROMPT = "The quick brown fox jumps over the lazy dog, " * 4  # its tokens need all workers
MOESAIC = Path(os.environ.get("MOESAIC_COMMAND") or Path(sys.executable).with_name("moesaic"))
# Requests wait for a worker that was killed until it is back, however slow its start is here.
PATIENT = {"MOESAIC_RECOVERY_S": str(HANG_S)}


def log_entries(log: Path) -> list[dict[str, Any]]:
    """Read the entries of a log that have been written whole."""
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]


@dataclass(frozen=True)
class Suite:
    """A running suite and the directory it runs in."""

    directory: Path
    url: str

    def cli(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Run a command against this suite."""
        return subprocess.run(
            [str(MOESAIC), *arguments],
            cwd=self.directory,
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
        )

    def state(self) -> dict[str, Any]:
        """Return the state that the supervisor last wrote."""
        return dict(json.loads((self.directory / "run/moesaic.json").read_text()))

    def pid(self, name: str) -> int:
        """Process id of one service."""
        return int(next(p["pid"] for p in self.state()["processes"] if p["name"] == name))

    def log(self, name: str) -> list[dict[str, Any]]:
        """Read the log entries of one service so far."""
        log = next(p["log"] for p in self.state()["processes"] if p["name"] == name)
        return log_entries(self.directory / log)

    def story(self) -> str:
        """The state of every process and the end of its log, to tell why a test failed."""
        parts = []
        for process in self.state()["processes"]:
            facts = {name: value for name, value in process.items() if value not in ("", 0)}
            lines = (self.directory / process["log"]).read_text(encoding="utf-8").splitlines()
            parts += [str(facts), *(f"  {line[:400]}" for line in lines[-STORY_LINES:])]
        return "\n".join(parts)

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to one service."""
        pid = self.pid(name)
        assert pid, f"{name} does not run"  # 0 would be everyone in this process group
        os.kill(pid, number)

    @contextmanager
    def unsupervised(self) -> Iterator[None]:
        """Start no process again that dies within the block."""
        supervisor = int(self.state()["pid"])
        os.kill(supervisor, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(supervisor, signal.SIGCONT)

    @property
    def credentials(self) -> "Credentials":
        """Return the credentials that its services ask for."""
        from tests.calls import credentials_of

        return credentials_of(self.directory / "run")

    def admin_address(self, name: str) -> str:
        """Return the address at which one service answers operators now."""
        processes = self.state()["processes"]
        return str(next(p["admin_address"] for p in processes if p["name"] == name))

    def channel(self, name: str) -> "grpc.aio.Channel":
        """A gRPC channel to one service."""
        return self.channel_to(self.admin_address(name))

    def channel_to(self, address: str) -> "grpc.aio.Channel":
        """Open a gRPC channel to any service of its cluster."""
        from tests.calls import channel_to

        return channel_to(address, self.credentials)

    def blocking_channel(self, address: str) -> "AbstractContextManager[grpc.Channel]":
        """Open a channel for tests without a loop; for unary calls."""
        from tests.calls import blocking_channel

        return blocking_channel(address, self.credentials)

    def metric(self, name: str, metric: str) -> float:
        """Read a metric of one service, summed over its labels."""
        address = next(p["metrics_address"] for p in self.state()["processes"] if p["name"] == name)
        lines = httpx.get(f"http://{address}/metrics", timeout=HANG_S).text.splitlines()
        values = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return sum(float(value) for key, value in values if key.partition("{")[0] == metric)

    def client(self) -> httpx.Client:
        """An HTTP client of this suite."""
        return httpx.Client(base_url=self.url, timeout=HANG_S, verify=False)

    def until_ready(self) -> None:
        """Wait until the gateway says that the suite is ready."""
        with self.client() as client:
            eventually(lambda: client.get("/readyz").status_code == 200)

    def until_joined(self) -> None:
        """Wait until the gateway knows all attention workers: a suite is ready with the first."""
        processes = self.state()["processes"]
        workers = {p["name"] for p in processes if p["role"] == "attention"}
        if any(p["role"] == "gateway" for p in processes):
            eventually(lambda: workers <= self.connected())

    def connected(self) -> set[str]:
        """The attention workers that its gateway has connected to so far."""
        log = self.log("gateway")
        return {entry["worker_id"] for entry in log if entry["event"] == "worker.connected"}

    def until_serving(self) -> None:
        """Wait until a request that needs every worker is answered: right after one is killed, the
        gateway may not know it yet and say that it is ready."""
        self.until_ready()
        body = {"model": "demo", "prompt": SERVED_PROMPT, "max_tokens": 1}
        with self.client() as client:
            eventually(lambda: client.post("/v1/completions", json=body).status_code == 200)


@contextmanager
def running(
    directory: Path, *flags: str, settings: Mapping[str, str] = MappingProxyType({})
) -> Iterator[Suite]:
    """A suite of the demo model, stopped at the end with nothing left behind.

    ``settings`` are variables of its environment alone: those of a session's fixture would reach other suites.
    """
    up = [str(MOESAIC), "up", "--detach", "--json", "--model", str(DEMO), "--port", "0", *flags]
    environment = dict(os.environ)
    done = subprocess.run(
        up,
        cwd=directory,
        env={**environment, **PATIENT, **settings},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    suite = Suite(directory, json.loads((directory / "run/moesaic.json").read_text())["url"])
    pids = [p["pid"] for p in suite.state()["processes"]]
    try:
        suite.until_joined()
        yield suite
    finally:
        pids += [p["pid"] for p in suite.state()["processes"]]
        down = suite.cli("down")
    assert down.returncode == 0, down.stdout + down.stderr
    assert not [pid for pid in pids if _runs_in(directory, pid)]


def _runs_in(directory: Path, pid: int) -> bool:
    """Tell whether a process is one of a suite's: its number may have become that of a stranger."""
    try:
        return Path(f"/proc/{pid}/cwd").resolve(strict=True).is_relative_to(directory.resolve())
    except OSError:
        return False
