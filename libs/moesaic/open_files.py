"""The files that a process may open, of which each connection is one: strangers get a share, not all."""

import resource
from contextlib import suppress


def raise_file_limit() -> None:
    """Let this process open as many files as it may: shells often allow 1,024 at first."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The kernel may not grant what it lists.
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def connections_within(share: float, most: int) -> int:
    """Bound a listener's connections by its share of the files that may be open now, and by ``most``."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if soft == resource.RLIM_INFINITY else max(1, min(most, int(soft * share)))
