"""Processes held to a part of a core each by control groups, as if each had a small device of its own."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
PERIOD_US = 5000  # short, so that a process seldom waits for longer than a layer takes


@contextmanager
def cpu_shares(pids: Iterable[int], cores: float) -> Iterator[bool]:
    """Hold each process, with all its threads, to ``cores`` for the length of the block.

    Yields:
        False where control groups cannot be made: then the processes have all cores.
    """
    made: list[Path] = []
    try:
        held = True
        try:
            for pid in pids:
                made.append(_group(f"moesaic-bench-{os.getpid()}-{pid}", cores))
                (made[-1] / "cgroup.procs").write_text(str(pid))
        except OSError:
            held = False
        yield held
    finally:
        for group in made:
            _empty(group)


def _group(name: str, cores: float) -> Path:
    """Make a group of either version of the kernel's interface."""
    quota_us = round(cores * PERIOD_US)
    first = GROUPS / "cpu"
    group = (first if first.is_dir() else GROUPS) / name
    group.mkdir()
    if first.is_dir():
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(quota_us))
    else:
        (group / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
    return group


def _empty(group: Path) -> None:
    """Give its processes back, and remove the group; those that have ended are gone already."""
    with suppress(OSError):
        for pid in (group / "cgroup.procs").read_text().split():
            with suppress(OSError):
                (group.parent / "cgroup.procs").write_text(pid)
        group.rmdir()
