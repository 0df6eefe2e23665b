"""A plugin of pytest that writes the outcome of each test as it comes: a run that is stopped has told those before."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

FILE = "GPU_TEST_OUTCOMES"  # the variable that names the file, of one line a report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write how a test ended, and what it took."""
    if report.when == "call" or report.outcome != "passed":
        _write([report.nodeid, report.outcome, round(report.duration, 2)])


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Write that a file could not be read."""
    if report.failed:
        _write([report.nodeid, "failed", 0.0])


def _write(line: list[Any]) -> None:
    # Workers of pytest-xdist send theirs to the process that started them.
    if "PYTEST_XDIST_WORKER" not in os.environ:
        with Path(os.environ[FILE]).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
