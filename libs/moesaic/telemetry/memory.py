"""The memory that this process has, and may still allocate."""

from collections.abc import Iterator
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
OWN_STATUS = Path("/proc/self/status")
OWN_GROUPS = Path("/proc/self/cgroup")
GROUPS = Path("/sys/fs/cgroup")


def free_bytes() -> int:
    """Count the free bytes of the machine within the limits of this process's control groups; 0 if unknown."""
    limits = [_of_machine(), *_of_groups()]
    return max(0, min((limit for limit in limits if limit is not None), default=0))


def _of_machine() -> int | None:
    try:
        lines = MEMINFO.read_text().splitlines()
    except OSError:
        return None
    found = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return next((int(kib) * 1024 for kib in found), None)


def _of_groups() -> Iterator[int]:
    """Give the bytes left in each control group with a limit, this process's own and those around it."""
    try:
        groups = [line.split(":", 2) for line in OWN_GROUPS.read_text().splitlines()]
    except OSError:
        return
    for _, controllers, path in groups:
        # Version 2
        if controllers == "":
            root, files = GROUPS, ("memory.max", "memory.current", "inactive_file")
        elif controllers == "memory":
            root = GROUPS / "memory"
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = root / path.lstrip("/")
        # In a container the path may be the host's, and then only the root is there.
        for directory in (group, *group.parents):
            if directory.is_relative_to(root) and (left := _left(directory, *files)) is not None:
                yield left


def _left(group: Path, limit: str, used: str, reclaimable: str) -> int | None:
    try:
        most = (group / limit).read_text().strip()
        if most == "max":
            return None
        pages = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        taken = int((group / used).read_text()) - int(pages.get(reclaimable, 0))
        return int(most) - taken
    except (OSError, ValueError):
        return None


def own_bytes() -> int:
    """Count the memory that this process has taken for itself, without files that it maps; 0 if unknown."""
    try:
        lines = OWN_STATUS.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), 0)
