"""Benchmarks that cannot run say what they need."""

import subprocess
import sys

import pytest
import torch


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_kernels_are_not_measured_without_a_cuda_device() -> None:
    command = [sys.executable, "-m", "moesaic.cli", "bench", "kernels", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 3
    assert "needs a CUDA device" in done.stderr
