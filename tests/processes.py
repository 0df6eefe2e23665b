"""Processes that a test's own process has started."""

from pathlib import Path


def children(module: str) -> set[int]:
    """List those that still run a module."""
    tasks = Path("/proc/self/task").iterdir()
    pids = {int(pid) for task in tasks for pid in (task / "children").read_text().split()}
    return {pid for pid in pids if module.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()}
