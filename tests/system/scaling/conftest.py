"""One suite with workers on standby for all tests here."""

import pytest

from tests.system.scaling.fleets import FLAGS, SETTINGS, Fleet
from tests.system.shared_suites import SharedSuites


@pytest.fixture
def fleet(suites: SharedSuites) -> Fleet:
    """1A2E active, 1A1E on standby; any two expert workers have room for all experts twice."""
    return Fleet(suites.get("standby", *FLAGS, settings=SETTINGS))
