"""Clients from npm, and where they are installed."""

import os
import shutil
from pathlib import Path

import pytest

from tests.suites import ROOT

_INSTALLED = Path(os.environ.get("MOESAIC_NPM") or ROOT / ".venv-clients/npm")


def installed(name: str) -> Path:
    """Find an installed package, or skip the test."""
    if shutil.which("node") is None:
        pytest.skip("node is not installed: clients from npm need version 18 or later")
    package = _INSTALLED / "node_modules" / name
    if not package.is_dir():
        pytest.skip(f"{name} of npm is not installed: make test-clients does that")
    return package
