"""The tests that need a CUDA device: kernels beside their references, models of all families, transfers."""

import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from moesaic.cli.terminal.outcome import CommandError, Exit

ROOT = Path(__file__).parents[1]
FOLDERS = ("tests/kernels", "tests/engine", "tests/models", "tests/experts")
OVER_UCX = ("tests/transport", "tests/dispatch")
WORKERS = 8  # most of their time goes to the compiler


def run(quick: bool) -> dict[str, Any]:
    """Run the tests marked ``gpu``; all of them, quick or not."""
    if not torch.cuda.is_available():
        raise CommandError(
            "gpu-tests needs a CUDA device, and a torch that was built for it", Exit.UNHEALTHY
        )
    folders = [*FOLDERS, *(OVER_UCX if find_spec("ucxx") else ())]
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "tests.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", f"--junitxml={report}"]
        # Plugins that the settings name may be missing where nothing can be installed.
        lenient = ["-W", "ignore::pytest.PytestConfigWarning", "--continue-on-collection-errors"]
        if find_spec("xdist"):
            lenient += ["-n", str(min(WORKERS, os.cpu_count() or 1)), "-p", "no:benchmark"]
        done = subprocess.run(
            [*command, *lenient, *folders], cwd=ROOT, stdout=sys.stderr, check=False
        )
        if not report.is_file():
            raise CommandError(f"pytest -m gpu ended with {done.returncode} and no report")
        cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]
    skipped = sum(case.find("skipped") is not None for case in cases)
    return {
        "config": {"folders": folders},
        "figures": {
            "passed": len(cases) - len(failed) - skipped,
            "failed": len(failed),
            "skipped": skipped,
            "failures": failed,
        },
        "notes": [],
        "failed": f"{len(failed)} tests failed" if failed else None,
    }
