"""Prometheus as a process of its own, with the project's configuration and rules."""

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.suites import ROOT, Suite
from tests.waiting import HANG_S, eventually

CONFIGURATION = ROOT / "deploy/observability/prometheus.yml"
WARNINGS = ("level=warn", "level=error", "level=WARN", "level=ERROR")
needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None,
    reason="prometheus is not on the PATH: it is in Debian's package prometheus",
)


@dataclass(frozen=True)
class Prometheus:
    """A running server."""

    client: httpx.Client
    log: Path

    def asked(self, path: str, **parameters: str) -> Any:
        """Ask its API; fails if it refuses, or answers with a warning."""
        answer = self.client.get(f"/api/v1/{path}", params=parameters).json()
        assert answer["status"] == "success", answer
        assert not answer.get("warnings"), answer
        return answer["data"]

    def series(self, query: str) -> list[dict[str, Any]]:
        """Series that a query gives now."""
        return list(self.asked("query", query=query)["result"])

    def targets(self) -> dict[str, list[tuple[str, str]]]:
        """Health and last error of each target, by job."""
        found: dict[str, list[tuple[str, str]]] = {}
        for target in self.asked("targets", state="active")["activeTargets"]:
            about = target["health"], target["lastError"]
            found.setdefault(target["labels"]["job"], []).append(about)
        return found

    def complaints(self) -> list[str]:
        """Lines of its log that warn, such as those about samples that it does not take."""
        lines = self.log.read_text(encoding="utf-8").splitlines()
        return [line for line in lines if any(each in line for each in WARNINGS)]


def metrics_of(suite: Suite) -> dict[str, list[str]]:
    """Addresses of metrics of a suite's processes, by role."""
    found: dict[str, list[str]] = {}
    for process in suite.state()["processes"]:
        if process.get("metrics_address"):
            found.setdefault(process["role"], []).append(process["metrics_address"])
    return found


@contextmanager
def scraping(
    directory: Path, targets: Mapping[str, Sequence[str]], interval: str = "1s"
) -> Iterator[Prometheus]:
    """Run Prometheus with the configuration of the project, but these targets.

    Args:
        directory: of its files.
        targets: addresses of metrics, by job. In containers, Docker's resolver gives them.
        interval: between two scrapes, and between two evaluations of rules.
    """
    config = yaml.safe_load(CONFIGURATION.read_text(encoding="utf-8"))
    config["global"] = {"scrape_interval": interval, "evaluation_interval": interval}
    config["rule_files"] = [str(CONFIGURATION.parent / each) for each in config["rule_files"]]
    for job in config["scrape_configs"]:
        del job["dns_sd_configs"]
        job["static_configs"] = [{"targets": list(targets.get(job["job_name"], ()))}]
    (directory / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    log = directory / "prometheus.log"
    command = [
        "prometheus",
        f"--config.file={directory / 'prometheus.yml'}",
        f"--storage.tsdb.path={directory / 'data'}",
        "--web.listen-address=127.0.0.1:0",
    ]
    with log.open("w", encoding="utf-8") as writing:
        process = subprocess.Popen(command, stdout=writing, stderr=subprocess.STDOUT)
    try:
        address = eventually(lambda: _address_in(log))
        with httpx.Client(base_url=f"http://{address}", timeout=HANG_S) as client:
            yield Prometheus(client, log)
    finally:
        process.terminate()
        process.wait(HANG_S)


def _address_in(log: Path) -> str | None:
    """Address that it listens on, once it answers."""
    text = log.read_text(encoding="utf-8")
    assert "err=" not in text, text
    found = re.search(r'"Listening on".* address=(\S+)', text)
    return found[1] if found and "ready to receive web requests" in text else None
