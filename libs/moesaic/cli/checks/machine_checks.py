"""Checks of this machine, each with its finding and, where it fails, the fix."""

import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

import moesaic
from moesaic.cli.checks.listeners import UNKNOWN, Listener, listeners_of
from moesaic.cli.checks.model_names import found_model, given_model
from moesaic.cli.checks.preflight import check_config, check_model, check_redis
from moesaic.cli.machine.facts import installed_version
from moesaic.cli.machine.ports import check_port
from moesaic.cli.machine.state import StateFile, SuiteState
from moesaic.cli.terminal.outcome import CommandError
from moesaic.cluster.redis.child import server_programs
from moesaic.errors import UnusableSettings
from moesaic.usage.names import ROLES
from moesaic.usage.packages import has_driver, how_to_install, missing_packages

GIB = 1 << 30
SHARED_MEMORY_BYTES = 256 << 20  # room for the send and receive buffers of a few connections
COMFORTABLE_CORES = 4
# The first driver for each major version of CUDA. It runs programs for all minor versions of that.
DRIVERS = {12: "525.60", 13: "580.65"}


class Finding(msgspec.Struct, frozen=True):
    """The outcome of one check."""

    name: str
    status: Literal["ok", "warn", "fail"]
    detail: str
    fix: str = ""
    listeners: tuple[Listener, ...] = ()  # of the suite that runs in this directory


def run_checks(model: str, port: int) -> list[Finding]:
    """Run all checks, in the order in which to solve their problems."""
    checks: list[Callable[[], Finding]] = [
        check_python,
        check_variables,
        check_packages,
        check_torch,
        check_driver,
        check_triton,
        check_kernels,
        check_ucx,
        check_rdma,
        check_redis_server,
        lambda: check_rest_port(port),
        check_cores,
        check_disk,
        check_shared_memory,
        check_locked_memory,
        lambda: check_model_directory(model),
    ]
    findings = [check() for check in checks]
    suite = StateFile().running()
    return findings if suite is None else [*findings, check_listeners(suite)]


def check_listeners(suite: SuiteState) -> Finding:
    """List where the processes of a suite can be reached, and what is open to others there."""
    found = tuple(listeners_of(suite))
    unknown = [each for each in found if each.kind == UNKNOWN]
    if unknown:
        named = ", ".join(f"{each.address} of {each.process}" for each in unknown)
        return Finding(
            "listeners", "fail", f"not Moesaic's own: {named}", "report it: SECURITY.md", found
        )
    outside = [each for each in found if not each.loopback]
    if unproved := [each for each in outside if each.kind in ("ranks", "UCX", "metrics")]:
        named = ", ".join(f"{each.kind} at {each.address}" for each in unproved)
        return Finding(
            "listeners",
            "warn",
            f"{len(outside)} of {len(found)} beyond this machine; they ask for no proof: {named}",
            "keep these networks to services of the cluster",
            found,
        )
    where = f"{len(outside)} of them beyond this machine" if outside else "all on this machine"
    return Finding("listeners", "ok", f"{len(found)}, {where}", listeners=found)


def check_python() -> Finding:
    """Name the Python that runs; a version too old cannot even read this file."""
    found = f"{platform.python_implementation()} {platform.python_version()} at {sys.executable}"
    return Finding("python", "ok", found)


def check_variables() -> Finding:
    """Look for misspelt variables with our prefix."""
    from moesaic.usage.names import unknown_variables
    from moesaic.usage.variables import ENV_PREFIX

    if problems := unknown_variables(os.environ):
        return Finding("variables", "fail", "; ".join(problems), "correct or unset them")
    count = sum(name.startswith(ENV_PREFIX) for name in os.environ)
    return Finding("variables", "ok", f"{count} {ENV_PREFIX}* variables, all of them known")


def check_packages() -> Finding:
    """Look for the packages that a suite needs."""
    missing = missing_packages(*ROLES, "structured", "up")
    if missing:
        fix = how_to_install(torch="torch" in missing)
        return Finding("packages", "fail", f"missing: {', '.join(missing)}", fix)
    return Finding("packages", "ok", f"moesaic {moesaic.__version__}, with all packages of a suite")


def check_torch() -> Finding:
    """Name the version of torch and its device."""
    try:
        import torch
    except ImportError as error:
        return Finding("torch", "fail", str(error), how_to_install(torch=True))
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name(0)
        return Finding("torch", "ok", f"{torch.__version__}, {torch.cuda.device_count()} x {name}")
    return judge_torch(torch.__version__, torch.version.cuda, has_driver())


def judge_torch(found: str, cuda: str | None, driver: bool) -> Finding:
    """Judge a torch that finds no CUDA device: one for CUDA has gigabytes that a machine without a GPU never uses.

    Args:
        found: its version.
        cuda: the version of CUDA that it is built for; None: it is for CPUs.
        driver: whether the machine has a driver for GPUs.
    """
    if cuda is None or driver:
        return Finding("torch", "ok", f"{found}, on CPU (no CUDA device)")
    fix = f"make a new environment with the build for CPUs: {how_to_install(torch=True)}; or keep it, as it works too"
    return Finding("torch", "warn", f"{found} is for CUDA {cuda}, and this machine has no GPU", fix)


def check_driver() -> Finding:
    """Compare NVIDIA's driver with the CUDA version of torch."""
    try:
        import pynvml
    except ImportError as error:
        return Finding("driver", "warn", str(error), how_to_install("attention"))
    try:
        pynvml.nvmlInit()
        driver = pynvml.nvmlSystemGetDriverVersion()
        supported = pynvml.nvmlSystemGetCudaDriverVersion_v2()
    except pynvml.NVMLError as error:
        return _without_driver(str(error), _cuda_of_torch())
    return compare_driver(driver, supported, _cuda_of_torch())


def compare_driver(driver: str, supported: int, needed: str | None) -> Finding:
    """Judge a driver for CUDA up to ``supported`` (13020 is 13.2) by the version of torch, if it has one."""
    found = f"{driver}, for CUDA up to {supported // 1000}.{supported % 1000 // 10}"
    if needed is None:
        fix = "to use GPUs, install a torch for CUDA, such as PyPI's"
        return Finding("driver", "warn", f"{found}, but torch is for CPUs", fix)
    found = f"{found}; torch is for {needed}"
    if supported // 1000 < _major(needed):
        return Finding("driver", "fail", found, f"install {_driver_for(needed)}")
    return Finding("driver", "ok", found)


def _without_driver(complaint: str, needed: str | None) -> Finding:
    device = os.environ.get("MOESAIC_DEVICE", "")
    if not device.startswith("cuda"):
        return Finding("driver", "ok", f"none, for computation on CPUs ({complaint})")
    fix = f"install {_driver_for(needed)}; containers also need NVIDIA's Container Toolkit"
    return Finding("driver", "fail", f"none for MOESAIC_DEVICE={device} ({complaint})", fix)


def _driver_for(cuda: str | None) -> str:
    oldest = DRIVERS.get(_major(cuda)) if cuda else None
    return (
        f"NVIDIA's driver {oldest} or later" if oldest else f"NVIDIA's driver for CUDA {cuda or ''}"
    )


def _major(version: str) -> int:
    return int(version.partition(".")[0])


def _cuda_of_torch() -> str | None:
    """Return the version of CUDA that torch is built for; None for a build for CPUs, or without torch."""
    try:
        import torch
    except ImportError:
        return None
    return torch.version.cuda


def check_triton() -> Finding:
    """Look for the compiler and the headers that Triton needs at its first launch on a GPU."""
    if _cuda_of_torch() is None:
        return Finding("triton", "ok", "not used: torch is for CPUs")
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    headers = Path(sysconfig.get_path("include", "posix_prefix")) / "Python.h"
    missing = [] if compiler else ["a C compiler"]
    missing += [] if headers.is_file() else [str(headers)]
    if missing:
        fix = "install them (Debian: apt install gcc libc6-dev python3-dev)"
        # PyPI's torch is for CUDA on machines without a GPU, too.
        status: Literal["warn", "fail"] = "fail" if _has_gpu() else "warn"
        return Finding("triton", status, f"missing: {', '.join(missing)}", fix)
    found = installed_version("triton") or "not installed"
    return Finding("triton", "ok", f"{found}, with {compiler} and the headers of Python")


def _has_gpu() -> bool:
    import torch

    return os.environ.get("MOESAIC_DEVICE", "").startswith("cuda") or torch.cuda.is_available()


def check_kernels() -> Finding:
    """Find the kernels for this processor, or compile them."""
    from moesaic.native.compile import find, this_variant

    try:
        variant = this_variant()
    except UnusableSettings as error:
        return Finding("kernels", "fail", str(error), "correct or unset it")
    named = " (MOESAIC_KERNELS)" if os.environ.get("MOESAIC_KERNELS") else ""
    try:
        return Finding("kernels", "ok", f"for {variant}{named}, {find(variant)}")
    except (OSError, subprocess.SubprocessError) as error:
        detail = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1:]
        fix = "install a C compiler (Debian: apt install gcc libc6-dev); torch computes until then"
        return Finding("kernels", "warn", f"for {variant}: {' '.join(detail)}", fix)


def check_ucx() -> Finding:
    """List the transports that UCX can use between processes and hosts."""
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    try:
        from ucxx._lib import libucxx

        info = libucxx.UCXContext().info
    except Exception as error:  # a broken native library can raise anything
        return Finding(
            "ucx", "fail", f"{type(error).__name__}: {error}", how_to_install("attention")
        )
    devices = [line.rpartition("-- ")[2].strip() for line in info.splitlines() if "-- " in line]
    found = f"{'.'.join(map(str, libucxx.get_ucx_version()))}: {', '.join(devices)}"
    return Finding("ucx", "ok", found)


def check_rdma() -> Finding:
    """Compare the RDMA devices of this machine with those that UCX can use."""
    directory = Path("/sys/class/infiniband")
    devices = sorted(each.name for each in directory.iterdir()) if directory.is_dir() else []
    try:
        from ucxx._lib import libucxx

        return compare_rdma(devices, libucxx.UCXContext().info)
    except Exception as error:  # a broken native library can raise anything
        return Finding("rdma", "warn", f"{type(error).__name__}: {error}", "see the check of ucx")


def compare_rdma(devices: list[str], ucx: str) -> Finding:
    """Judge RDMA devices by UCX's description of itself: its components, and its transports with their devices."""
    has_infiniband = re.search(r"component \d+ +: +ib\b", ucx) is not None
    usable = [line.rpartition("-- ")[2].strip() for line in ucx.splitlines() if "-- " in line]
    usable = [each for each in usable if each.partition("/")[2].partition(":")[0] in devices]
    if not devices:
        found = "with" if has_infiniband else "without"
        return Finding("rdma", "ok", f"no RDMA devices; UCX is {found} InfiniBand")
    named = ", ".join(devices)
    if not has_infiniband:
        fix = (
            "install the extra rdma, then python -m moesaic.transport.ucx.rdma_libraries DIRECTORY"
        )
        return Finding("rdma", "warn", f"{named}; UCX is without InfiniBand", fix)
    if not usable:
        fix = "let this user read and write /dev/infiniband; in a container, mount it"
        return Finding("rdma", "warn", f"{named}; UCX has InfiniBand and can use none of them", fix)
    return Finding("rdma", "ok", f"UCX can use {', '.join(usable)}")


def check_redis_server() -> Finding:
    """Ask a given Redis, or find a server to start."""
    url = os.environ.get("MOESAIC_REDIS_URL") or os.environ.get("REDIS_URL")
    if url:
        try:
            check_redis(url)
        except CommandError as error:
            return Finding("redis", "fail", str(error), "see the message")
        return Finding("redis", "ok", "REDIS_URL answers")
    fix = f"{how_to_install('up')}, or set REDIS_URL"
    programs = server_programs()
    if not programs:
        return Finding("redis", "fail", "no server program", fix)
    try:
        done = subprocess.run(
            [programs[0], "--version"], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        return Finding("redis", "fail", f"{programs[0]} cannot be run: {error}", fix)
    return Finding("redis", "ok", f"{done.stdout.split(' sha=')[0].strip()} at {programs[0]}")


def check_rest_port(port: int) -> Finding:
    """Check that the gateway's port is free, or taken by the suite of this directory."""
    running = StateFile().running()
    if running is not None and running.url.endswith(f":{port}"):
        return Finding("port", "ok", f"{port}: the suite of this directory listens there")
    try:
        check_port("127.0.0.1", port)
    except CommandError as error:
        return Finding("port", "warn", str(error), "moesaic up --port 0 takes a free one")
    return Finding("port", "ok", f"{port} is free")


def check_cores() -> Finding:
    """Count the cores for several computing processes."""
    from moesaic.cli.machine.cores import usable_cores

    cores = usable_cores()
    detail = f"{cores} cores, OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'unset')}"
    if cores < COMFORTABLE_CORES:
        fix = "moesaic up --topology local is the fastest on few cores"
        return Finding("cores", "warn", detail, fix)
    return Finding("cores", "ok", detail)


def check_disk() -> Finding:
    """Check the free space for a suite's run directory."""
    from moesaic.cli.machine.disk import check_room, free_bytes
    from moesaic.cli.machine.state import RUN_DIRECTORY

    try:
        check_room(RUN_DIRECTORY)
    except CommandError as error:
        return Finding("disk", "fail", str(error), "make room, or start it from another directory")
    free = free_bytes(RUN_DIRECTORY)
    found = "unknown" if free is None else f"{free / GIB:.1f} GiB"
    return Finding("disk", "ok", f"{found} free for {RUN_DIRECTORY}/, logs and state")


def check_shared_memory() -> Finding:
    """Check the free space in /dev/shm for connections through shared memory."""
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError as error:
        fix = "mount a tmpfs at /dev/shm, or start workers with --transports socket"
        return Finding("/dev/shm", "warn", str(error), fix)
    detail = f"{free / GIB:.2f} GiB free"
    if free < SHARED_MEMORY_BYTES:
        fix = "give the container more (docker run --shm-size 1g), or use --transports socket"
        return Finding("/dev/shm", "warn", detail, fix)
    return Finding("/dev/shm", "ok", detail)


def check_locked_memory() -> Finding:
    """Check that RDMA devices, if there are any, can register memory."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    detail = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft // 1024} KiB"
    rdma = Path("/dev/infiniband").is_dir()
    if rdma and soft != resource.RLIM_INFINITY:
        fix = "raise it: ulimit -l unlimited, or ulimits: memlock: -1 in compose"
        return Finding("memlock", "fail", f"{detail}, with RDMA devices", fix)
    return Finding("memlock", "ok", f"{detail}, {'with' if rdma else 'no'} RDMA devices")


def check_model_directory(model: str) -> Finding:
    """Check that the model can be served and has a tokenizer."""
    try:
        model = given_model(model)
    except CommandError as error:
        return Finding("model", "warn", "none was named", str(error))
    try:
        directory = found_model(
            model, weights=False
        )  # of the hub: what says whether it can be served
        config = check_model(model) if directory == model else check_config(directory)
    except CommandError as error:
        return Finding("model", "fail", str(error), "give a model directory with --model")
    if not (Path(directory) / "tokenizer.json").is_file():
        fix = "copy tokenizer.json of the model there"
        return Finding("model", "fail", f"{model}: no tokenizer.json", fix)
    moe = config.moe
    return Finding("model", "ok", f"{model}: {moe.num_experts} experts, top {moe.top_k}")
