"""NVIDIA's Multi-Process Service for the length of a block: processes that share a device run at the same time."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

DAEMON = "nvidia-cuda-mps-control"
WAIT_S = 20
# A process that finds no daemon in its directory has the device for itself, in turns with others.
WITHOUT = {"CUDA_MPS_PIPE_DIRECTORY": "/nonexistent"}
# Makes a context, and knows no torch, whose import takes seconds.
PROBE = (
    "import ctypes; cuda = ctypes.CDLL('libcuda.so.1'); "
    "raise SystemExit(cuda.cuInit(0) or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), 0))"
)


@contextmanager
def sharing_the_device(wanted: bool = True) -> Iterator[Mapping[str, str]]:
    """Give the variables by which a process finds the service.

    There are none if it is not wanted, not installed, or refuses a first process.
    """
    if not wanted or shutil.which(DAEMON) is None:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="moesaic-mps-", ignore_cleanup_errors=True) as name:
        # The daemon's own files; both names are NVIDIA's.
        found = {"CUDA_MPS_PIPE_DIRECTORY": name, "CUDA_MPS_LOG_DIRECTORY": name}
        environment = os.environ | found
        started = _succeeds([DAEMON, "-d"], environment)
        try:
            # In a container the daemon may start, and yet refuse all clients.
            works = started and _succeeds([sys.executable, "-c", PROBE], environment)
            yield found if works else {}
        finally:
            if started:
                _succeeds([DAEMON], environment, b"quit\n")


def _succeeds(command: list[str], environment: Mapping[str, str], said: bytes = b"") -> bool:
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, input=said, env=environment, check=False, timeout=WAIT_S)
        return done.returncode == 0
    return False
