"""What the native library says of libucp, held against UCX's own headers."""

import shutil
import subprocess
from pathlib import Path

import libucx
import pytest

from moesaic.native import header

HEADERS = Path(libucx.__file__).parent / "include"


@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no compiler")
@pytest.mark.skipif(not (HEADERS / "ucp/api/ucp.h").exists(), reason="UCX came without headers")
def test_declarations_are_those_of_ucx() -> None:
    source = Path(__file__).with_name("ucp_declared.c")
    folders = [f"-I{header.HEADER.parent}", f"-I{HEADERS}"]
    command = ["gcc", "-std=gnu11", "-Wall", "-Werror", "-fsyntax-only", *folders, str(source)]

    compiled = subprocess.run(command, capture_output=True, text=True)

    assert compiled.returncode == 0, compiled.stderr
