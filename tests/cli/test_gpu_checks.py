"""What ``moesaic doctor`` says of NVIDIA's driver, and of what Triton needs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moesaic.cli.checks.machine_checks import (
    Finding,
    check_triton,
    compare_driver,
    judge_torch,
)

# A library with the calls that ask for versions; all else of NVML is absent.
NVML = """
#include <string.h>
int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlInit_v2(void) { return 0; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { strncpy(text, "570.86.15", size); return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 12080; return 0; }
"""
# The one fact of torch that the check reads; the package itself takes seconds.
CHECK = """
import sys, msgspec
from types import SimpleNamespace
sys.modules["torch"] = SimpleNamespace(version=SimpleNamespace(cuda="13.0"))
from moesaic.cli.checks.machine_checks import check_driver
print(msgspec.json.encode(check_driver()).decode())
"""


def checked(**environment: str) -> Finding:
    """The finding about the driver in a process with a torch for CUDA 13.0."""
    command = [sys.executable, "-c", CHECK]
    paths = {"PYTHONPATH": ":".join(sys.path)}
    shown = subprocess.run(
        command, env=paths | environment, capture_output=True, text=True, check=True
    )
    return Finding(**json.loads(shown.stdout))


@pytest.fixture
def old_driver(tmp_path: Path) -> str:
    """The directory of the library of a driver that knows CUDA 12.8."""
    (tmp_path / "nvml.c").write_text(NVML)
    command = ["cc", "-shared", "-fPIC", "-o", "libnvidia-ml.so.1", "nvml.c"]
    subprocess.run(command, cwd=tmp_path, check=True)
    return str(tmp_path)


@pytest.mark.parametrize(
    ("supported", "needed", "status"),
    [
        (13000, "13.0", "ok"),
        (13020, "13.0", "ok"),
        (13000, "13.2", "ok"),  # a driver runs all minor versions
        (14000, "13.0", "ok"),
        (12080, "13.0", "fail"),
        (13000, None, "warn"),
    ],
)
def test_a_driver_must_know_the_major_version_of_cuda_that_torch_is_built_for(
    supported: int, needed: str | None, status: str
) -> None:
    assert compare_driver("580.65.06", supported, needed).status == status


def test_a_driver_that_is_too_old_is_named_with_one_that_is_not(old_driver: str) -> None:
    finding = checked(LD_LIBRARY_PATH=old_driver)

    assert finding.status == "fail"
    assert finding.detail == "570.86.15, for CUDA up to 12.8; torch is for 13.0"
    assert "580.65 or later" in finding.fix


@pytest.mark.parametrize(("device", "status"), [("cpu", "ok"), ("cuda:1", "fail")])
def test_without_a_driver_only_the_cpu_can_be_the_device(
    device: str, status: str, tmp_path: Path
) -> None:
    (tmp_path / "libnvidia-ml.so.1").write_bytes(b"no library")  # also where there is a driver

    finding = checked(MOESAIC_DEVICE=device, LD_LIBRARY_PATH=str(tmp_path))

    assert finding.status == status


def test_a_machine_for_gpus_without_a_compiler_is_told_what_triton_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert check_triton().status == "warn"
    monkeypatch.setenv("MOESAIC_DEVICE", "cuda:1")
    assert check_triton().status == "fail"
    assert "a C compiler" in check_triton().detail

    monkeypatch.setattr(torch.version, "cuda", None)
    assert check_triton().status == "ok"


def test_a_torch_for_cuda_on_a_machine_without_a_gpu_is_named() -> None:
    found = judge_torch("2.13.0+cu130", "13.0", driver=False)

    assert (found.status, found.detail) == (
        "warn",
        "2.13.0+cu130 is for CUDA 13.0, and this machine has no GPU",
    )
    assert "--extra-index-url https://download.pytorch.org/whl/cpu" in found.fix


@pytest.mark.parametrize(("cuda", "driver"), [(None, False), (None, True), ("13.0", True)])
def test_a_torch_that_fits_the_machine_is_fine(cuda: str | None, driver: bool) -> None:
    assert judge_torch("2.13.0", cuda, driver).status == "ok"
