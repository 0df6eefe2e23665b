"""An agent that is started beside a suite, and may be held to an amount of memory by the kernel."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.suites import Suite, log_entries
from tests.waiting import HANG_S, until

GROUPS = Path("/sys/fs/cgroup")
ITS_OWN = ("--worker-id", "--admin-port", "--metrics-port", "--memory-bytes")


@dataclass(frozen=True)
class LateAgent:
    """A running agent."""

    process: subprocess.Popen[bytes]
    log: Path

    async def until_ready(self) -> None:
        """Wait until it takes requests."""
        await until(lambda: any(e["event"] == "agent.ready" for e in log_entries(self.log)))


@contextmanager
def late_agent(
    suite: Suite,
    name: str,
    memory_bytes: int,
    group: Path | None = None,
    ahead_s: float = 0,
) -> Iterator[LateAgent]:
    """Start an agent with the settings of the suite's; it leaves in order at the end.

    Args:
        suite: that it joins.
        name: its worker id.
        memory_bytes: for the model.
        group: a control group that it starts in.
        ahead_s: by which its clock differs from everybody's.
    """
    of_another = Path(f"/proc/{suite.pid('agent-0')}")
    command = (of_another / "cmdline").read_text().split("\0")[:-1]
    variables = (of_another / "environ").read_text().split("\0")
    flags = command[command.index("moesaic.services.edge_agent") + 1 :]
    others = [idx + more for flag in ITS_OWN for idx in [flags.index(flag)] for more in (0, 1)]
    kept = [word for idx, word in enumerate(flags) if idx not in others]
    # By TCP, as from a machine of its own.
    own = ("--worker-id", name, "--memory-bytes", str(memory_bytes), "--transports", "socket")
    entering = f"echo $$ > {group / 'cgroup.procs'}; " if group else ""
    environment = dict(variable.split("=", 1) for variable in variables if variable)
    if ahead_s:
        environment["PYTHONPATH"] = str(_of_another_clock(suite.directory / "clock", ahead_s))
    path = suite.directory / "run" / f"{name}.log"
    with path.open("wb") as log:
        process = subprocess.Popen(
            [
                *("sh", "-c", f'{entering}exec "$0" "$@"'),
                *(sys.executable, "-m", "moesaic.services.edge_agent", *kept, *own),
            ],
            cwd=suite.directory,
            env=environment,
            stdout=log,
            stderr=log,
        )
    try:
        yield LateAgent(process, path)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=HANG_S)


def _of_another_clock(directory: Path, ahead_s: float) -> Path:
    """Make a directory of what Python runs first, and change the time of day with it."""
    directory.mkdir(exist_ok=True)
    (directory / "sitecustomize.py").write_text(
        f"import time\nright = time.time\ntime.time = lambda: right() + {ahead_s}\n"
    )
    return directory


@contextmanager
def memory_group(name: str, limit_bytes: int) -> Iterator[Path]:
    """A control group whose processes the kernel kills if they take more; skips where there can be none."""
    if (GROUPS / "cgroup.controllers").exists():
        group, limit = GROUPS / name, "memory.max"
    else:
        group, limit = GROUPS / "memory" / name, "memory.limit_in_bytes"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control groups can be made here: {error}")
    try:
        if not (group / limit).exists():
            pytest.skip("control groups do not limit memory here")
        (group / limit).write_text(str(limit_bytes))
        yield group
    finally:
        group.rmdir()


def own_bytes(pid: int) -> int:
    """Count the memory that a process has taken for itself, without files that it maps."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def num_killed(group: Path) -> int:
    """Count the processes of a group that the kernel has killed for their memory."""
    for name in ("memory.events", "memory.oom_control"):
        told = group / name
        if told.exists():
            counts = dict(line.split() for line in told.read_text().splitlines())
            return int(counts.get("oom_kill", 0))
    return 0
