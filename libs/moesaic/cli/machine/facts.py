"""Facts of the machine that a measurement is taken on."""

import ast
import hashlib
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "triton", "ucxx-cu13", "numpy", "transformers")
KERNELS = Path(__file__).parents[2] / "kernels" / "triton"
EXPORTED = "$Format:%H$"  # the commit, where git archive has made the sources
PROBE_SIZE = 768
PROBE_ROUNDS = 15


def machine_facts() -> dict[str, Any]:
    """Collect cores, processor, memory, system, and the versions that a measurement depends on."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu_model": _cpu_model(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": {name: installed_version(name) for name in PACKAGES},
        "gpu": _gpu_name(),
    }


def installed_version(package: str) -> str | None:
    """Look up the installed version of a distribution; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def commit() -> str:
    """Name the commit of the sources, with ``-dirty`` if they were changed since; or ``unknown``."""
    if not EXPORTED.startswith("$"):
        return EXPORTED
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return described.stdout.strip() or "unknown"


def kernel_digests(directory: Path = KERNELS) -> dict[str, str]:
    """Digest each module of Triton kernels, without comments and docstrings, by its name."""
    return {
        path.stem: _digest_of_code(path.read_text(encoding="utf-8"))
        for path in sorted(directory.glob("*.py"))
        if path.stem != "__init__"
    }


def _digest_of_code(source: str) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            node.body[:1] = [ast.Pass()]
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()[:12]


def gemm_gflops() -> float:
    """Measure the rate of a fixed matrix product in GFLOP/s, which shows a drift of the machine's speed."""
    import torch

    left, right = torch.ones(PROBE_SIZE, PROBE_SIZE), torch.ones(PROBE_SIZE, PROBE_SIZE)
    durations = []
    for _ in range(PROBE_ROUNDS):
        started = time.perf_counter()
        torch.mm(left, right)
        durations.append(time.perf_counter() - started)
    return round(2 * PROBE_SIZE**3 / sorted(durations)[len(durations) // 2] / 1e9, 1)


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


def _gpu_name() -> str | None:
    # Not worth loading for this alone.
    torch = sys.modules.get("torch")
    return torch.cuda.get_device_name(0) if torch and torch.cuda.is_available() else None
