"""The C++ side of the fake device, compiled once into the user's cache."""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch

from moesaic.native.compile import cache_directory

_SOURCE = Path(__file__).with_name("guard.cpp")


@cache
def guard() -> ctypes.CDLL:
    """Return the loaded library; the test is skipped if there is no C++ compiler."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("the fake device needs a C++ compiler: install g++")
    digest = hashlib.sha256(_SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    home = cache_directory()
    target = home / f"fake-device-{digest}.so"
    if not target.exists():
        _compile(compiler, home, target)
    return ctypes.CDLL(str(target))


def _compile(compiler: str, home: Path, target: Path) -> None:
    root = Path(torch.__file__).parent
    home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home) as work:
        made = Path(work) / target.name
        subprocess.run(
            [
                *(compiler, "-std=c++20", "-O1", "-fPIC", "-shared", f"-I{root / 'include'}"),
                *(str(_SOURCE), "-o", str(made), f"-L{root / 'lib'}", "-lc10"),
            ],
            check=True,
            capture_output=True,
            text=True,
        )
        os.replace(made, target)
