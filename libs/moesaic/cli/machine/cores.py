"""The number of cores that this process may use."""

import os
from pathlib import Path


def usable_cores() -> int:
    """Count the cores that this process is bound to, within its control group's limit."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))
