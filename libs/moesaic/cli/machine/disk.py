"""Free space on the disk for a suite's logs, state and Redis data."""

import os
from pathlib import Path

from moesaic.cli.terminal.outcome import CommandError, Exit

MIB = 1 << 20
NEEDED_BYTES = 16 * MIB  # logs of the first minutes, and Redis's data; batches need more later


def free_bytes(directory: Path) -> int | None:
    """Count the bytes this user can still write where ``directory`` is or will be; None if unknown."""
    found = directory.absolute()
    while not found.exists():
        found = found.parent
    disk = os.statvfs(found)
    return disk.f_bavail * disk.f_frsize if disk.f_blocks else None


def check_room(directory: Path) -> None:
    """Check, before a start, that a suite has space to write in a directory.

    Raises:
        CommandError: there is less space than a start needs.
    """
    free = free_bytes(directory)
    if free is not None and free < NEEDED_BYTES:
        raise CommandError(
            f"{directory.absolute()}: only {free / MIB:.1f} MiB are free, but a suite needs "
            f"{NEEDED_BYTES / MIB:.0f} MiB for its logs and its Redis; free space, or start it from "
            "another directory",
            Exit.USAGE,
        )
