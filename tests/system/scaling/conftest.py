"""One suite with workers on standby for all tests here."""

from collections.abc import Iterator

import pytest

from tests.suites import Suite, running
from tests.system.scaling.fleets import FLAGS, SETTINGS, Fleet


@pytest.fixture(scope="session")
def standby_suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suite]:
    """1A2E active, 1A1E on standby; any two expert workers have room for all experts twice."""
    with running(tmp_path_factory.mktemp("standby"), *FLAGS, settings=SETTINGS) as suite:
        yield suite


@pytest.fixture
def fleet(standby_suite: Suite) -> Fleet:
    """Its fleet."""
    return Fleet(standby_suite)
