"""Links to another UCX: ucxx runs on the libraries of a wheel that gives its files names of their own."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from moesaic.transport.ucx.rdma_libraries import WHEELS, libraries_of_wheel, link

LOADED = """
from ucxx._lib import libucxx
from pathlib import Path
info = libucxx.UCXContext().info
lines = Path("/proc/self/maps").read_text().splitlines()
print(*sorted({line.split()[-1] for line in lines if "/libuc" in line and "ucxx" not in line}))
print(*[line.split()[-1] for line in info.splitlines() if " component " in line and " md " not in line])
"""


def loaded(directory: Path) -> tuple[list[Path], set[str]]:
    """The files of UCX that a process of ucxx loads, and the components that it finds."""
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(directory),
        "RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY": "true",
    }
    command = [sys.executable, "-c", LOADED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    files, components = done.stdout.splitlines()
    return [Path(file) for file in files.split()], set(components.split())


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A wheel's libraries: those of ucxx's own UCX, with names that no program asks for."""
    spec = find_spec("libucx")
    assert spec is not None
    assert spec.origin is not None
    own, libraries = Path(spec.origin).parent / "lib", tmp_path / "wheel.libs"
    (libraries / "ucx").mkdir(parents=True)
    for name in ("libucm", "libucs", "libuct", "libucp"):
        (libraries / f"{name}-01234567.so.0.0.0").symlink_to((own / f"{name}.so.0").resolve())
    for file in own.glob("ucx/libuct_*.so.0.0.0"):
        (libraries / "ucx" / file.name).symlink_to(file.resolve())
    return libraries


def test_ucxx_loads_the_linked_ucx_with_its_modules_and_no_second_one(
    wheel: Path, tmp_path: Path
) -> None:
    link(wheel, tmp_path / "links")
    link(wheel, tmp_path / "links")

    files, components = loaded(tmp_path / "links")

    names = [file.name.partition(".so")[0] for file in files]
    assert {"libucs", "libuct", "libucp", "libuct_cma"} <= set(names)
    assert len(names) == len(set(names))
    assert not any("signal" in name for name in names)
    assert {"tcp", "cma"} <= components


def test_a_directory_without_links_leaves_ucxx_with_its_own_ucx(tmp_path: Path) -> None:
    files, components = loaded(tmp_path)

    assert any(file.parent.parent.name == "libucx" for file in files)
    assert "tcp" in components


def test_the_ucx_of_the_wheel_has_infiniband(tmp_path: Path) -> None:
    libraries = libraries_of_wheel()
    if libraries is None:
        pytest.skip(f"needs one of {', '.join(WHEELS)}: the extra rdma")
    link(libraries, tmp_path)

    files, components = loaded(tmp_path)

    assert "ib" in components
    assert all(file.is_relative_to(libraries) for file in files)
