"""Random models of each family."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.parity.cases import CASES, build_reference

BASES = [case for case in CASES if case.name == "base"]


@pytest.fixture(scope="module", params=BASES, ids=str)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory: Path = tmp_path_factory.mktemp("model")
    build_reference(request.param, directory)
    return SimpleNamespace(directory=directory)
