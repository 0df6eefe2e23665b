"""The tests that need a CUDA device: kernels beside their references, models of all families, transfers."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.outcomes import FILE
from moesaic.cli.terminal.outcome import CommandError, Exit

ROOT = Path(__file__).parents[1]
# Those that have such tests: others would be read in vain, and import more packages.
FOLDERS = ("tests/kernels",)
OVER_UCX = ("tests/transport/parcels", "tests/dispatch/routed")
WORKERS = 8  # most of their time goes to the compiler
TELL_S = 10.0
SLOWEST = 10


def run(quick: bool) -> Iterator[dict[str, Any]]:
    """Run the tests marked ``gpu``; all of them, quick or not. Tell what has ended every few seconds."""
    if not torch.cuda.is_available():
        raise CommandError(
            "gpu-tests needs a CUDA device, and a torch that was built for it", Exit.UNHEALTHY
        )
    return _outcomes([*FOLDERS, *(OVER_UCX if _has_ucxx() else ())])


def _has_ucxx() -> bool:
    """Tell if UCXX is there and finds its libraries: pytest runs no test at all where a conftest cannot be imported."""
    try:
        import_module("ucxx")
    except ImportError:
        return False
    return True


def _outcomes(folders: list[str]) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as directory:
        told = Path(directory) / "outcomes"
        told.touch()
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-m",
            "gpu",
            "-p",
            "benchmarks.gpu.outcomes",
        ]
        # Plugins that the settings name may be missing where nothing can be installed.
        lenient = ["-W", "ignore::pytest.PytestConfigWarning", "--continue-on-collection-errors"]
        if find_spec("xdist"):
            lenient += ["-n", str(min(WORKERS, os.cpu_count() or 1)), "-p", "no:benchmark"]
        process = subprocess.Popen(
            [*command, *lenient, *folders],
            cwd=ROOT,
            stdout=sys.stderr,
            env=os.environ | {FILE: str(told)},
        )
        try:
            while process.poll() is None:
                yield _result(folders, told)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(TELL_S)
        finally:
            process.terminate()
            process.wait()
        result = _result(folders, told)
    figures = result["figures"]
    if not figures["passed"] + figures["failed"]:
        raise CommandError(f"pytest -m gpu ended with {process.returncode}, and no test has run")
    failed = f"{figures['failed']} tests failed" if figures["failed"] else None
    yield result | {"failed": failed}


def _result(folders: list[str], told: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in told.read_text(encoding="utf-8").splitlines()]
    # What fails after a test, at its teardown, counts as its outcome.
    outcomes = {test: outcome for test, outcome, _ in lines}
    count = list(outcomes.values()).count
    slowest = sorted(lines, key=lambda line: -line[2])[:SLOWEST]
    return {
        "config": {"folders": folders},
        "figures": {
            **{outcome: count(outcome) for outcome in ("passed", "failed", "skipped")},
            "failures": [test for test, outcome in outcomes.items() if outcome == "failed"],
            "slowest_s": {test: seconds for test, _, seconds in slowest},
        },
        "notes": [],
    }
