"""The units of systemd, enabled as their page says: a systemd that boots in a container starts them, and they serve."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from moesaic.cluster.redis.child import server_programs
from tests.suites import DEMO, ROOT
from tests.waiting import HANG_S, eventually

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("systemd-nspawn") is None,
    reason="a systemd of its own takes root and Debian's package systemd-container",
)
UNITS = [
    f"moesaic-{name}"
    for name in ("scheduler@0", "gateway@0", "attention@0", "expert@0", "expert@1")
]
REDIS = """
[Service]
ExecStart={program} --port 6379 --requirepass {password} --dir /tmp
[Install]
WantedBy=multi-user.target
"""
# The root of the host is that of the container. What this runs by is there under other names, because units hide /tmp
# and /root, where it may be here.
PYTHON = Path(sys.executable).resolve().name
PROGRAM = f'#!/bin/sh\nLD_LIBRARY_PATH=/opt/python/lib exec /opt/python/bin/{PYTHON} -m moesaic.cli "$@"\n'
BINDS = {
    sys.base_prefix: "/opt/python",
    sysconfig.get_path("purelib"): "/opt/packages",
    str(ROOT): "/opt/source",
    str(DEMO): "/srv/demo",
}
SETTINGS = """\
PYTHONPATH=/opt/source/libs:/opt/source:/opt/packages
MOESAIC_MODEL=/srv/demo
MOESAIC_THREADS=1
OMP_NUM_THREADS=1
OMP_WAIT_POLICY=passive
"""
PASSWORD = "of-this-test"


@dataclass(frozen=True)
class Machine:
    """A container in which systemd runs."""

    leader: int

    def run(self, *command: str) -> "subprocess.CompletedProcess[str]":
        """Run a command in it, as root."""
        inside = ["nsenter", f"--target={self.leader}", "--all", "--root", "--wd=/"]
        return subprocess.run([*inside, *command], capture_output=True, text=True, timeout=HANG_S)

    def property(self, unit: str, name: str) -> str:
        """A property of a unit."""
        return self.run("systemctl", "show", "--value", f"--property={name}", unit).stdout.strip()

    def journal(self) -> str:
        """The last lines of all services."""
        return self.run("journalctl", "--no-pager", "--lines=60", "-u", "moesaic-*").stdout


def install(root: Path) -> None:
    """Follow docs/operate/systemd.md in another root."""
    program = root / "opt/moesaic/bin/moesaic"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(PROGRAM)
    program.chmod(0o755)
    etc, units = root / "etc/moesaic", root / "etc/systemd/system"
    etc.mkdir(exist_ok=True)
    (etc / "moesaic.env").write_text(SETTINGS)
    secrets = {
        "secret": "s" * 32,
        "api_key": "key",
        "redis_url": f"redis://:{PASSWORD}@127.0.0.1:6379/0",
    }
    for name, value in secrets.items():
        (etc / name).write_text(value)
        (etc / name).chmod(0o600)
    shutil.rmtree(units)  # the host's own
    shutil.copytree(ROOT / "deploy/systemd", units)
    redis = server_programs()[0]
    shutil.copy(redis, root / "usr/local/bin/redis-of-test")
    (units / "redis-of-test.service").write_text(
        REDIS.format(program="/usr/local/bin/redis-of-test", password=PASSWORD)
    )
    user = ["--system", "--home-dir", "/nonexistent", "--shell", "/usr/sbin/nologin", "moesaic"]
    subprocess.run(["useradd", "--root", str(root), *user], check=True, capture_output=True)
    enable = ["systemctl", f"--root={root}", "enable", "redis-of-test", *UNITS]
    subprocess.run(enable, check=True, capture_output=True)


@contextmanager
def mounted(kind: str, where: Path, *options: str) -> Iterator[Path]:
    """Mount a file system for a while; skip the test if this may not be."""
    where.mkdir()
    done = subprocess.run(
        ["mount", "-t", kind, *options, kind, str(where)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"cannot mount here: {done.stderr}")
    try:
        yield where
    finally:
        subprocess.run(["umount", str(where)], check=True)


@contextmanager
def booted(root: Path, log: Path) -> Iterator[Machine]:
    """Boot systemd in a root; skip the test if it may not be run here."""
    command = ["systemd-nspawn", f"--directory={root}", "--boot", "--register=no", "--keep-unit"]
    command += ["--private-network", "--machine=moesaic-test", "--console=pipe"]
    command += [f"--bind-ro={here}:{there}" for here, there in BINDS.items()]
    with log.open("w") as writing:
        process = subprocess.Popen(
            [*command, "systemd.unit=multi-user.target"],
            stdin=subprocess.DEVNULL,
            stdout=writing,
            stderr=subprocess.STDOUT,
        )
    try:
        eventually(lambda: process.poll() is not None or _systemd_in(process))
        if process.poll() is not None:
            pytest.skip(f"systemd does not boot here: {log.read_text()}")
        machine = Machine(_systemd_in(process)[0])
        eventually(lambda: machine.property("multi-user.target", "ActiveState") == "active")
        yield machine
    finally:
        process.terminate()
        process.wait(HANG_S)


def _systemd_in(process: "subprocess.Popen[bytes]") -> list[int]:
    """Process id of the first process in the container, once it runs."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(pid) for pid in children if Path(f"/proc/{pid}/comm").read_text() == "systemd\n"]


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """A host whose root is this one's, with changes of its own that are forgotten, and the units enabled."""
    directory = tmp_path_factory.mktemp("machine")
    with mounted("tmpfs", directory / "changes") as changes:
        over, work = changes / "over", changes / "work"
        over.mkdir()
        work.mkdir()
        layers = f"lowerdir=/,upperdir={over},workdir={work}"
        with mounted("overlay", directory / "root", "-o", layers) as root:
            install(root)
            with booted(root, directory / "console.log") as machine:
                eventually(lambda: ask(machine, "readyz").returncode == 0)
                yield machine


def ask(machine: Machine, path: str, *options: str) -> "subprocess.CompletedProcess[str]":
    """Ask the gateway, by a client within the machine, which has a network of its own."""
    curl = ["curl", "--silent", "--fail", "--header", "Authorization: Bearer key", *options]
    return machine.run(*curl, f"http://127.0.0.1:8000/{path}")


def test_enabled_units_serve_a_classification(machine: Machine) -> None:
    body = {
        "model": "demo",
        "input": "my card was declined at the petrol station",
        "labels": ["banking", "travel", "work"],
    }

    answer = ask(machine, "v1/classify", "--json", json.dumps(body))

    assert answer.returncode == 0, machine.journal()
    assert json.loads(answer.stdout)["data"][0]["label"] == "banking"
    assert {machine.property(unit, "ActiveState") for unit in UNITS} == {"active"}
    assert {machine.property(unit, "User") for unit in UNITS} == {"moesaic"}


def test_systemd_starts_a_killed_worker_again(machine: Machine) -> None:
    before = machine.property("moesaic-expert@0", "MainPID")

    machine.run("systemctl", "kill", "--signal=KILL", "moesaic-expert@0")

    eventually(lambda: machine.property("moesaic-expert@0", "NRestarts") == "1")
    eventually(lambda: machine.property("moesaic-expert@0", "MainPID") not in (before, "0"))
    eventually(lambda: ask(machine, "readyz").returncode == 0)


def test_systemd_does_not_start_a_service_with_a_wrong_setting_again(machine: Machine) -> None:
    machine.run("sh", "-c", "echo MOESAIC_SLOTS_PER_LAYER=many > /etc/moesaic/expert.env")

    machine.run("systemctl", "restart", "moesaic-expert@1")
    eventually(lambda: machine.property("moesaic-expert@1", "ActiveState") == "failed")

    assert machine.property("moesaic-expert@1", "ExecMainStatus") == "2"
    assert machine.property("moesaic-expert@1", "NRestarts") == "0"
    assert "slots_per_layer" in machine.journal()


def test_stopped_units_end_in_time(machine: Machine) -> None:
    stopping = [unit for unit in UNITS if unit != "moesaic-expert@1"]

    machine.run("systemctl", "stop", *stopping)

    assert {machine.property(unit, "Result") for unit in stopping} == {"success"}, machine.journal()
