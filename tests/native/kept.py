"""What tests make of sources alone, kept in the user's cache by a digest of these."""

import hashlib
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

from moesaic.native.compile import cache_directory

UNUSED_S = 30 * 24 * 3600.0


def kept(name: str, sources: Iterable[bytes], make: Callable[[Path], None]) -> Path:
    """Return the file that ``make`` has written from these sources, now or in an earlier run.

    It appears whole or not at all. Files of the same name that no run has used for a month go.
    """
    digest = hashlib.sha256()
    for source in sources:
        digest.update(hashlib.sha256(source).digest())
    home = cache_directory() / "tests"
    home.mkdir(parents=True, exist_ok=True)
    target = home / f"{name}-{digest.hexdigest()[:16]}"
    if target.exists():
        os.utime(target)
        return target
    with TemporaryDirectory(dir=home) as work:
        made = Path(work) / name
        make(made)
        os.replace(made, target)
    for old in home.glob(f"{name}-????????????????"):
        if old.stat().st_mtime < time.time() - UNUSED_S:
            old.unlink(missing_ok=True)
    return target
