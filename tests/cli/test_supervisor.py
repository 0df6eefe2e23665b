import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from moesaic.cli.machine.state import process_start_time
from moesaic.cli.suite.processes import Service
from moesaic.cli.suite.supervisor import ServiceFailed, Supervisor
from tests.cli.conftest import gone
from tests.waiting import eventually, until

FOREVER = "import signal\nwhile True: signal.pause()"
ON_SIGTERM = """
import signal, sys, time
def stop(*_):
    print(time.monotonic(), flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
print("up", flush=True)
while True: signal.pause()
"""


def supervisor(
    directory: Path, scripts: dict[str, str], said: list[tuple[str, str]] | None = None
) -> Supervisor:
    """A supervisor of services that run the given Python scripts; a name begins with a role."""

    def command(service: Service, admin_port: int, metrics_port: int) -> list[str]:
        return [sys.executable, "-c", scripts[service.name], str(admin_port), str(metrics_port)]

    lines = said if said is not None else []
    return Supervisor(
        [Service(name=name, role=name.partition("-")[0], flags=()) for name in scripts],
        directory,
        announce=lambda name, text: lines.append((name, text)),
        changed=lambda: None,
        command=command,
    )


async def test_a_killed_service_is_started_again(tmp_path: Path) -> None:
    said: list[tuple[str, str]] = []
    kept = supervisor(tmp_path, {"expert-0": FOREVER}, said)
    stop = asyncio.Event()
    running = asyncio.create_task(kept.run(os.environ, stop))
    await until(lambda: kept.processes[0].pid)
    first = kept.processes[0].pid

    os.kill(first, signal.SIGKILL)
    await until(lambda: kept.processes[0].restarts == 1 and kept.processes[0].pid)

    second = kept.processes[0].pid
    assert process_start_time(second) is not None
    assert second != first
    assert any("was killed by SIGKILL" in text and "again in 1 s" in text for _, text in said)
    stop.set()
    await running
    assert process_start_time(second) is None


async def test_a_service_that_cannot_start_stops_the_suite_with_its_last_words(
    tmp_path: Path,
) -> None:
    broken = "print('no weights here'); raise SystemExit(1)"
    kept = supervisor(tmp_path, {"expert-0": broken, "attention-0": FOREVER})

    with pytest.raises(ServiceFailed, match=r"failed to start 3 times(.|\n)*no weights here"):
        await kept.run(os.environ, asyncio.Event())

    assert all(process.pid == 0 for process in kept.processes)


async def test_bad_settings_stop_the_suite_at_once(tmp_path: Path) -> None:
    kept = supervisor(tmp_path, {"gateway": "raise SystemExit(2)"})

    with pytest.raises(ServiceFailed, match="no restart can help"):
        await kept.run(os.environ, asyncio.Event())

    assert kept.processes[0].restarts == 0


async def test_the_gateway_ends_before_the_workers_are_told_to(tmp_path: Path) -> None:
    names = ["scheduler", "expert-0", "attention-0", "gateway"]
    kept = supervisor(tmp_path, dict.fromkeys(names, ON_SIGTERM))
    logs = {name: tmp_path / f"{name}.log" for name in names}
    stop = asyncio.Event()
    running = asyncio.create_task(kept.run(os.environ, stop))
    await until(lambda: all(log.exists() and "up\n" in log.read_text() for log in logs.values()))

    stop.set()
    await running

    ended = {name: float(log.read_text().split()[-1]) for name, log in logs.items()}
    assert sorted(ended, key=ended.__getitem__) == [*reversed(names)]


def test_services_die_with_a_supervisor_that_is_killed(
    tmp_path: Path,
) -> None:
    script = f"""
import asyncio, os, sys, json
from pathlib import Path
from moesaic.cli.suite.processes import Service
from moesaic.cli.suite.supervisor import Supervisor
kept = Supervisor(
    [Service(name=n, role="expert", flags=()) for n in ("a", "b")], Path({str(tmp_path)!r}),
    announce=lambda *_: None,
    changed=lambda: all(p.pid for p in kept.processes)
    and print(json.dumps([p.pid for p in kept.processes]), flush=True),
    command=lambda *_: [sys.executable, "-c", {FOREVER!r}],
)
asyncio.run(kept.run(os.environ, asyncio.Event()))
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pids = json.loads(parent.stdout.readline())
    assert not gone(pids)

    parent.kill()
    parent.communicate()

    eventually(lambda: gone(pids))
