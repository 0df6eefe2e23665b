"""The suite in containers, and the same suite as processes to compare it with."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.compose.containers import Containers
from tests.compose.load import Answers
from tests.suites import CLINC_DOMAIN, running


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is here; builds and faults take their time."""
    for item in items:
        if Path(__file__).parent in item.path.parents and item.path.name != "test_files.py":
            item.add_marker(pytest.mark.compose)


@pytest.fixture(scope="session")
def expected(
    tmp_path_factory: pytest.TempPathFactory, clinc_rows: list[dict[str, object]]
) -> Answers:
    """The answers of the suite when it runs as processes."""
    with (
        running(tmp_path_factory.mktemp("processes"), "--slots-per-layer", "32") as suite,
        suite.client() as client,
    ):
        return Answers.of(client, clinc_rows)


@pytest.fixture(scope="session")
def containers(expected: Answers) -> Iterator[Containers]:
    """The suite of profile ``disaggregated``; removed at the end with its volume and networks."""
    suite = Containers("moesaic-test", port=18700)
    try:
        suite.compose("up", "-d", "--wait", "--wait-timeout", "120", "--no-build")
        yield suite
    finally:
        suite.down()


@pytest.fixture
def client(containers: Containers) -> Iterator[httpx.Client]:
    """A client of the published port; the suite is ready, and is so again after the test."""
    with containers.client() as client:
        containers.until_ready()
        yield client
        containers.until_ready()


@pytest.fixture(scope="session")
def clinc_rows() -> list[dict[str, object]]:
    """50 rows of the clinc_domain test split, from all over it."""
    with gzip.open(CLINC_DOMAIN, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    return rows[:: len(rows) // 50][:50]
