"""Suites of edge agents."""

import asyncio

import pytest

from tests.suites import Suite
from tests.system.edge.control import SETTINGS
from tests.system.edge.users import RightAnswers
from tests.system.shared_suites import LOCAL, SharedSuites

# To report often; memory limits are for experts in float32.
QUICK = ("--topology", "edge", "--activation-window-s", "0.5", "--dtype", "float32")
TIGHT = (*QUICK, "--agents", "3", "--memory", "40M,40M,80M")
MOVING = {
    "MOESAIC_PLACEMENT_POLICY": "keep",
    "MOESAIC_REPLAN_INTERVAL_S": "3",
    "MOESAIC_LOAD_SHARE": "0.5",
}


@pytest.fixture(scope="session")
def right_answers(suites: SharedSuites) -> RightAnswers:
    """What every site must answer."""
    return asyncio.run(RightAnswers.of(suites.get(*LOCAL).url))


@pytest.fixture
def tight(suites: SharedSuites) -> Suite:
    """Three agents, two of which hold few of the experts, and none of them has spares."""
    return suites.get("tight", *TIGHT, settings=SETTINGS)


@pytest.fixture
def roomy(suites: SharedSuites) -> Suite:
    """Three agents with most of the experts each, which stay where they are until a policy is set."""
    flags = (*QUICK, "--agents", "3", "--memory", "80M,80M,80M")
    return suites.get("roomy", *flags, settings=SETTINGS | MOVING)
