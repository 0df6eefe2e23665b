"""A cluster of two hosts, from its description to its answers: the files of ``moesaic deploy compose`` run for real.

Each host is a network namespace with a cable to a switch, and an IPC namespace. No engine is asked for.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from moesaic.cli.checks.links import check_links
from moesaic.cli.deployment.cluster import deploy
from moesaic.cli.machine.links.link import LinkShape
from moesaic.cli.machine.links.network import joined
from moesaic.cli.terminal.outcome import CommandError
from tests.compose.load import classify
from tests.suites import DEMO, ROOT, Suite, log_entries
from tests.system.asking import PROMPTS, complete
from tests.waiting import HANG_S, eventually

GBIT = 1_000_000_000
DESCRIPTION = """
model = "{model}"
publish = "{alpha}:8000"
settings = {{threads = 1}}

[hosts.alpha]
control = "{alpha}"
attention = 1
expert = 1

[hosts.beta]
control = "{beta}"
expert = 1
"""
ROWS = [
    {"text": "what is my balance", "labels": ["banking", "travel", "kitchen and dining"]},
    {"text": "book me a flight to london", "labels": ["banking", "travel", "kitchen and dining"]},
    {"text": "how long do i boil an egg", "labels": ["banking", "travel", "kitchen and dining"]},
]


class Cluster:
    """A running cluster, as tests ask a suite."""

    def __init__(self, directory: Path, url: str) -> None:
        self.directory, self.url = directory, url
        self.key = (directory / "secrets" / "api_key").read_text().strip()

    def client(self) -> httpx.Client:
        """A client of its gateway."""
        headers = {"Authorization": f"Bearer {self.key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=HANG_S)

    def ready(self) -> bool:
        """True once the gateway takes requests."""
        try:
            with self.client() as client:
                return client.get("/readyz").status_code == 200
        except httpx.TransportError:
            return False

    def log(self, host: str, service: str) -> list[dict[str, Any]]:
        """The entries of a service's log."""
        return log_entries(self.directory / host / f"{service}.log")

    def story(self) -> str:
        """The ends of all logs, to tell why a test failed."""
        logs = sorted(self.directory.glob("*/*.log"))
        return "\n".join(f"{log}\n{log.read_text()[-1500:]}" for log in logs)


@contextmanager
def hosts(directory: Path, namespaces: dict[str, str]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start all hosts at once; nothing of them is left at the end."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'libs'}:{ROOT}"}
    started = []
    try:
        for host, namespace in namespaces.items():
            own = ("ip", "netns", "exec", namespace, "unshare", "--ipc", "--", sys.executable)
            program = ("-m", "tests.system.topologies.compose_host", str(directory / host), host)
            started.append(subprocess.Popen([*own, *program], env=environment, cwd=ROOT))
        yield started
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait(HANG_S)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """The cluster of the description, ready for requests."""
    try:
        check_links("", ())
    except CommandError as error:
        pytest.skip(f"needs network namespaces: {error}")
    with joined(("alpha", "beta"), LinkShape(GBIT)) as network:
        alpha, beta = network.cables
        text = DESCRIPTION.format(model=DEMO, alpha=alpha.address, beta=beta.address)
        (tmp_path / "hosts.toml").write_text(text)
        deploy(tmp_path / "hosts.toml", tmp_path / "cluster")
        found = Cluster(tmp_path / "cluster", f"http://{alpha.address}:8000")
        namespaces = {cable.agent: cable.namespace for cable in network.cables}
        with hosts(tmp_path / "cluster", namespaces) as started:
            eventually(lambda: found.ready() or any(each.poll() is not None for each in started))
            assert all(each.poll() is None for each in started), found.story()
            yield found


def test_the_generated_files_run_and_answer_as_one_process_does(
    cluster: Cluster, local: Suite
) -> None:
    with cluster.client() as ours, local.client() as theirs:
        assert [classify(ours, row) for row in ROWS] == [classify(theirs, row) for row in ROWS]
    for prompt in PROMPTS[:3]:
        reference = complete(local, prompt)
        assert complete(cluster, prompt)["token_ids"] == reference["token_ids"]

    # The experts of its own host are reached through memory, those of the other host over the network.
    experts = {("alpha", "expert-0"): "ring", ("beta", "expert-0"): "socket"}
    for place, plane in experts.items():
        joining = [each for each in cluster.log(*place) if each["event"] == "peer.joined"]
        planes = {each["plane"] for each in joining if each["peer"] == "attention-alpha-0"}
        assert planes == {plane}, place
