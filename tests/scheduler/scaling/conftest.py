"""One fleet and its clock for all tests of controllers here."""

import pytest

from moesaic.cluster.registry import Fleet
from tests.scheduler.scaling.controlled import Clock, attention_workers


@pytest.fixture
def fleet() -> Fleet:
    fleet = Fleet()
    fleet.workers, fleet.stale = attention_workers(1), False
    return fleet


@pytest.fixture
def clock() -> Clock:
    return Clock()
