"""The image for GPUs compiles kernels where a worker runs, without a GPU.

Its torch is a build for CPUs here, as that for CUDA is gigabytes. The Dockerfile adds Triton and the
compiler to either, and compilation uses nothing else. So two kernels stand for all, which
``tests/kernels/triton/test_compilation.py`` compiles with the same Triton.
"""

import json
import os
from collections.abc import Iterator

import pytest

from tests.compose.containers import docker
from tests.compose.test_images import SERVICES, image
from tests.suites import ROOT

FILES = ("compose.yaml", "compose.gpu.yaml", "tests/compose/no_gpu.yaml")
FIRST_LAUNCH = "tests/compose/first_launch.py"
COMPILE = "tests/kernels/triton/compile_for_hopper.py"
CASES = "norm gate"
CACHE = "/var/cache/moesaic"


@pytest.fixture(scope="module")
def project() -> Iterator[tuple[str, ...]]:
    """The command of a compose project whose volumes are new."""
    files = [part for file in FILES for part in ("-f", file)]
    command = ("compose", "-p", f"moesaic-test-gpu-{os.getpid()}", *files)
    try:
        yield command
    finally:
        docker(*command, "--profile", "disaggregated", "down", "-v", "--remove-orphans")


def run(project: tuple[str, ...], command: str, script: str = FIRST_LAUNCH) -> list[str]:
    """The lines that a command writes in a new container of an expert worker, which has ``script``."""
    options = ("run", "--rm", "--no-deps", "-T", "-v", f"{ROOT / script}:/{script}:ro")
    entry = ("--entrypoint", "sh", "expert", "-c", command)
    return docker(*project, *options, *entry).splitlines()


def start(
    project: tuple[str, ...], script: str, arguments: str = ""
) -> tuple[list[str], list[str]]:
    """What a script writes in a new container, and each file of the cache with its time of writing."""
    find = f"find {CACHE} -type f -printf '%p %T@\\n'"
    lines = run(project, f"python /{script} {arguments} && {find} | sort", script)
    files = [line for line in lines if line.startswith(CACHE)]
    return lines[: -len(files)], files


def test_a_worker_may_write_to_its_cache_and_load_code_from_there(project: tuple[str, ...]) -> None:
    user, *lines = run(project, "id -u && cat /proc/mounts")
    mounts = {place: set(options.split(",")) for _, place, _, options, *_ in map(str.split, lines)}

    assert user == "10001"
    assert "ro" in mounts["/"]
    assert {"rw", "noexec"} <= mounts["/tmp"]
    assert "rw" in mounts[CACHE]
    assert "noexec" not in mounts[CACHE]


def test_the_launcher_is_built_at_the_first_start_and_found_at_the_second(
    project: tuple[str, ...],
) -> None:
    first = start(project, FIRST_LAUNCH)
    second = start(project, FIRST_LAUNCH)

    output, files = first
    assert output == ["loaded"]
    assert any("/cuda_utils." in file for file in files)
    assert second == first


def test_kernels_compile_at_the_first_start_and_are_found_at_the_second(
    project: tuple[str, ...],
) -> None:
    first = start(project, COMPILE, CASES)
    second = start(project, COMPILE, CASES)

    output, files = first
    kernels = {json.loads(line)["kernel"] for line in output}
    assert kernels
    assert all(any(f"/{kernel}.cubin " in file for file in files) for kernel in kernels)
    assert second == first


@pytest.mark.parametrize("service", SERVICES)
def test_an_image_for_cpus_has_no_compiler(service: str) -> None:
    look = "command -v gcc || echo none"
    entry = ("run", "--rm", "--network", "none", "--entrypoint", "sh", image(service))
    assert docker(*entry, "-c", look) == "none\n"
