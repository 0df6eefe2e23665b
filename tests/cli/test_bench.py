"""Benchmarks that cannot run say what they need."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

INSTALLED = str(Path(sys.executable).with_name("moesaic"))  # unlike -m, without this directory


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
@pytest.mark.parametrize("name", ["kernels", "serving"])
def test_a_gpu_is_not_measured_without_a_cuda_device(name: str) -> None:
    command = [INSTALLED, "bench", name, "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 3
    assert "needs a CUDA device" in done.stderr


def test_two_phases_are_not_measured_without_the_tools_for_namespaces() -> None:
    command = [INSTALLED, "bench", "two-phase", "--quick"]
    environment = {**os.environ, "PATH": "/nowhere"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)

    assert done.returncode == 3
    assert "there is no ip" in done.stderr
