"""Processes that end with the one that started them."""

import ctypes
import os
import signal
from collections.abc import Callable

PR_SET_PDEATHSIG = 1  # linux/prctl.h
_libc = ctypes.CDLL(
    None, use_errno=True
)  # loaded here: nothing may be loaded between fork and exec


def die_with(parent_pid: int) -> Callable[[], None]:
    """Make the function for a child to run before ``exec``: the kernel then kills it when its parent dies."""

    def before_exec() -> None:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        # The parent died before the line above.
        if os.getppid() != parent_pid:
            os._exit(1)

    return before_exec
