"""The file of a host that ``moesaic deploy compose`` writes, started by Docker as it is written."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from moesaic.cli.deployment.cluster import deploy
from tests.compose.containers import docker, logs
from tests.compose.load import PROMPTS, Answers, classify, stream
from tests.suites import DEMO
from tests.waiting import HANG_S

PORT = 18701
DESCRIPTION = """
model = "{model}"
tag = "{tag}"
publish = "127.0.0.1:{port}"
settings = {{threads = 1, served_model_name = "demo"}}

[hosts.alpha]
control = "{address}"
attention = 1
expert = 2
"""
# The processes of other services whose secrets a worker can list, by their command lines.
READABLE = """
import os
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        command = open(f"/proc/{pid}/cmdline").read().replace(chr(0), " ")
        os.listdir(os.path.join("/proc", pid, "root", "run", "secrets"))
    except OSError:
        continue
    print(command)
"""


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The words of a compose command for the host's services, which run."""
    directory = tmp_path_factory.mktemp("hosts")
    gateway = "{{(index .IPAM.Config 0).Gateway}}"
    address = docker("network", "inspect", "bridge", "-f", gateway).strip()
    tag = os.environ.get("MOESAIC_TAG", "dev")
    text = DESCRIPTION.format(model=DEMO, tag=tag, port=PORT, address=address)
    (directory / "hosts.toml").write_text(text)
    deploy(directory / "hosts.toml", directory / "cluster")
    file = directory / "cluster/alpha/alpha.yaml"
    # The engine of a test may reach no registry: it has an image of Redis under another name.
    profile = ("compose", "--profile", "disaggregated")
    known = json.loads(docker(*profile, "config", "--format", "json"))["services"]["redis"]
    override = directory / "redis.yaml"
    override.write_text(json.dumps({"services": {"redis": {"image": known["image"]}}}))
    words = ["compose", "-p", "moesaic-hosts", "-f", str(file), "-f", str(override)]
    try:
        docker(*words, "up", "-d", "--wait", "--wait-timeout", str(int(HANG_S)))
        yield words
    finally:
        docker(*words, "down", "-v", "-t", "20")


@pytest.fixture
def client(host: list[str]) -> Iterator[httpx.Client]:
    """A client of the host's gateway."""
    secrets = Path(host[host.index("-f") + 1]).parent / "secrets"
    headers = {"Authorization": f"Bearer {(secrets / 'api_key').read_text().strip()}"}
    url = f"http://127.0.0.1:{PORT}"
    with httpx.Client(base_url=url, headers=headers, timeout=HANG_S) as client:
        yield client


def test_a_host_answers_as_processes_do(client: httpx.Client, expected: Answers) -> None:
    assert [classify(client, row) for row in expected.rows[:10]] == expected.labels[:10]
    assert [stream(client, prompt) for prompt in PROMPTS[:3]] == expected.texts[:3]


def test_workers_of_a_host_meet_in_its_memory(host: list[str]) -> None:
    containers = docker(*host, "ps", "-q", "expert-0", "expert-1").split()
    lines = [line for container in containers for line in logs(container).splitlines()]
    entries = [json.loads(line) for line in lines if line.startswith("{")]

    joined = [each for each in entries if each["event"] == "peer.joined"]
    planes = {(e["instance"], e["plane"]) for e in joined if e["peer"] == "attention-alpha-0"}
    assert planes == {("expert-alpha-0", "ring"), ("expert-alpha-1", "ring")}


def test_a_worker_cannot_read_the_secrets_of_services_that_are_no_workers(host: list[str]) -> None:
    readable = docker(*host, "exec", "-T", "expert-0", "python", "-c", READABLE)

    assert "moesaic.services.expert" in readable
    assert "moesaic.services.gateway" not in readable
    assert "moesaic.services.scheduler" not in readable
