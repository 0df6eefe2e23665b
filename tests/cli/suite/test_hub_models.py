"""``--model owner/name``: the real command with a real server that speaks the hub's API."""

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moesaic.cli.machine.state import SuiteState
from tests.cli.conftest import LIBRARY, environment
from tests.hub_server import Hub, HubRepository, commit_of, hub_server
from tests.waiting import eventually

Run = Callable[..., "subprocess.CompletedProcess[str]"]
Start = Callable[..., "subprocess.Popen[str]"]
Wait = Callable[[str], SuiteState]


@pytest.fixture
def hub(house: Path) -> Iterator[Hub]:
    """The model of the house at a hub, and no longer in the house."""
    files = {file.name: file.read_bytes() for file in (house / "model").iterdir()}
    with hub_server(acme__tiny=HubRepository(files)) as server:
        yield server


def test_a_suite_serves_a_model_of_the_hub(
    start: Start, suite: Wait, house: Path, hub: Hub
) -> None:
    cache = hub.variables(house / "cache")
    process = start("up", "--model", "acme/tiny", "--port", "0", **cache)
    state = suite("ready")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()

    commit = commit_of(hub.repositories["acme/tiny"].files)
    directory = house / "cache" / "hub" / "models--acme--tiny" / "snapshots" / commit
    assert (state.model, state.model_name) == (str(directory), "acme/tiny")
    assert f"--model {directory}" in (house / "run" / "expert-0.log").read_text()
    assert "downloading acme/tiny: 0.00 of 0.00 GiB" in err
    assert len(hub.bodies()) == 1


def test_a_suite_that_cannot_start_downloads_no_weights(run: Run, house: Path, hub: Hub) -> None:
    cache = hub.variables(house / "cache")
    refused = run("up", "--model", "acme/tiny", "--slots-per-layer", "1", **cache)
    assert refused.returncode == 2
    assert "--slots-per-layer" in refused.stderr
    assert hub.bodies() == []
    assert not (house / "run").exists()


def test_an_unknown_model_is_wrong_use(run: Run, house: Path, hub: Hub) -> None:
    cache = hub.variables(house / "cache")
    refused = run("up", "--model", "acme/unknown", **cache)
    assert refused.returncode == 2
    assert refused.stderr.startswith("moesaic: --model: acme/unknown: no such directory here")
    assert refused.stderr.count("\n") == 1


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the package as a wheel installs it, without the rest of its clone; with compiled modules."""
    directory = tmp_path_factory.mktemp("outside")
    leave = shutil.ignore_patterns("built")
    shutil.copytree(LIBRARY, directory / "site" / "moesaic", ignore=leave)
    return directory


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (
            ("up",),
            2,
            "moesaic: --model: the demo model is not on this machine: pip install moesaic-demo",
        ),
        (("up", "--model", "models/demo"), 2, "moesaic: --model models/demo: no such directory"),
        (("plan", "models/demo"), 2, "moesaic: --model models/demo: no such directory"),
        (("doctor",), None, "give a model directory, or a repository"),
    ],
)
def test_the_name_of_the_demo_is_never_asked_of_a_hub(
    outside: Path, arguments: tuple[str, ...], status: int | None, says: str
) -> None:
    with hub_server(models__demo=HubRepository({"config.json": b"{}"})) as hub:
        found = hub.variables(outside / "cache") | {"PYTHONPATH": str(outside / "site")}
        done = subprocess.run(
            [sys.executable, "-m", "moesaic.cli", *arguments],
            cwd=outside,
            env=environment(**found),
            capture_output=True,
            text=True,
        )

    assert hub.requests == []
    assert says in " ".join((done.stdout + done.stderr).split())
    assert status in (None, done.returncode)  # what else doctor finds depends on the machine


def test_ctrl_c_ends_a_download_and_leaves_no_half_files(
    start: Start, house: Path, hub: Hub
) -> None:
    hub.repositories["acme/tiny"].files["model.safetensors"] = bytes(200 << 20)
    hub.pause_s = 0.5  # the download would see only after seconds that it is to end
    cache = hub.variables(house / "cache")
    process = start("up", "--model", "acme/tiny", "--port", "0", **cache)
    eventually(lambda: hub.bodies() and list((house / "cache").rglob("*.incomplete")))

    process.send_signal(signal.SIGINT)
    _, err = process.communicate()

    assert process.returncode == 130
    assert "interrupted; repeat the command to fetch the missing files" in err
    assert list((house / "cache").rglob("*.incomplete")) == []
