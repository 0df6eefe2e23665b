"""A real suite of the demo model, as other people's clients meet it.

These tests run in the environment of the clients (``make test-clients``); those that need only the ``openai``
package are part of ``make test`` as well.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.suites import Suite, running

# A suite starts within it. It names a hang and nothing else.
LIMIT_S = 900


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the tests here more time than others."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(LIMIT_S))


@pytest.fixture(scope="session")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suite]:
    """One attention worker, two expert workers."""
    with running(tmp_path_factory.mktemp("clients")) as suite:
        yield suite
