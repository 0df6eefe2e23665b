"""NVIDIA's Multi-Process Service for the length of a block: processes that share a device run at the same time."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

DAEMON = "nvidia-cuda-mps-control"
STOP_S = 20


@contextmanager
def sharing_the_device(wanted: bool = True) -> Iterator[Mapping[str, str]]:
    """Give the variables by which a process finds the service; none if it is not wanted or not installed."""
    if not wanted or shutil.which(DAEMON) is None:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="moesaic-mps-") as directory:
        # The daemon's own files; both names are NVIDIA's.
        found = {"CUDA_MPS_PIPE_DIRECTORY": directory, "CUDA_MPS_LOG_DIRECTORY": directory}
        environment = os.environ | found
        started = subprocess.run([DAEMON, "-d"], env=environment, check=False)
        try:
            yield {} if started.returncode else found
        finally:
            if not started.returncode:
                subprocess.run(
                    [DAEMON], input=b"quit\n", env=environment, check=False, timeout=STOP_S
                )
