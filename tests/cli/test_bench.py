"""Benchmarks say what they need, and leave nothing behind when they are ended."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

WAITS = """
import select, sys
def run(quick):
    try:
        print("measuring", file=sys.stderr, flush=True)
        # Python sees a signal between two calls: one that came right before a read without end is never seen.
        while not select.select([sys.stdin], [], [], 0.1)[0]:
            pass
    finally:
        print("cleaned", file=sys.stderr, flush=True)
"""

TELLS = """
def run(quick):
    figures = {}
    for number in range(3):
        if number == 2 and quick:
            raise RuntimeError("the device is gone")
        figures[str(number)] = number
        yield {"config": {}, "figures": figures, "notes": []}
"""

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
    assert "command ip not found" in done.stderr


def test_a_benchmark_that_is_terminated_ends_what_it_started(tmp_path: Path) -> None:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__init__.py").touch()
    (tmp_path / "benchmarks" / "waits.py").write_text(WAITS)
    command = [INSTALLED, "bench", "waits"]
    pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE}

    with subprocess.Popen(command, cwd=tmp_path, text=True, **pipes) as process:
        assert process.stderr is not None
        while process.stderr.readline() != "measuring\n":
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        told = process.stderr.read()

    assert "cleaned" in told
    assert process.returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize(("quick", "told"), [(True, 2), (False, 3)])
def test_a_benchmark_that_fails_keeps_what_it_has_told(
    quick: bool, told: int, tmp_path: Path
) -> None:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__init__.py").touch()
    (tmp_path / "benchmarks" / "tells.py").write_text(TELLS)
    command = [INSTALLED, "bench", "tells", "--json", "result.json", *["--quick"] * quick]

    done = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)

    result = json.loads((tmp_path / "result.json").read_text())
    assert len(result["figures"]) == told
    assert result.get("unfinished", False) == quick == (done.returncode != 0)
