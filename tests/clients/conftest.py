"""A real suite of the demo model, as other people's clients meet it.

These tests run in the environment of the clients (``make test-clients``); those that need only the packages
``openai`` and ``anthropic`` are part of ``make test`` as well.
"""

from collections.abc import Iterator

import pytest

from tests.suites import Suite, running


@pytest.fixture(scope="session")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suite]:
    """One attention worker, two expert workers."""
    with running(tmp_path_factory.mktemp("clients")) as suite:
        yield suite
