"""Is there room on the disk for what a suite writes? Its logs, its state, its Redis's data."""

import os
from pathlib import Path

from moesaic.cli.outcome import CommandError, Exit

MIB = 1 << 20
NEEDED_BYTES = 16 * MIB  # logs of the first minutes, and Redis's data; batches need more later


def free_bytes(directory: Path) -> int | None:
    """What this user can still write where ``directory`` is or will be; None if nobody can say."""
    found = directory.absolute()
    while not found.exists():
        found = found.parent
    disk = os.statvfs(found)
    return disk.f_bavail * disk.f_frsize if disk.f_blocks else None


def check_room(directory: Path) -> None:
    """Make sure that a suite can write in a directory, before anything of it is there.

    Raises:
        CommandError: there is less than a start needs.
    """
    free = free_bytes(directory)
    if free is not None and free < NEEDED_BYTES:
        raise CommandError(
            f"{directory.absolute()}: {free / MIB:.1f} MiB are free there, and a suite needs "
            f"{NEEDED_BYTES / MIB:.0f} MiB for its logs and its Redis; make room, or start it from "
            "another directory",
            Exit.USAGE,
        )
