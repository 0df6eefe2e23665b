"""Suites of edge agents."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from tests.suites import Suite, running
from tests.system.edge.control import SETTINGS
from tests.system.edge.users import RightAnswers

QUICK = ("--topology", "edge", "--profile-interval-s", "0.5")  # to report
TIGHT = (*QUICK, "--agents", "3", "--memory", "40M,40M,80M")
MOVING = {
    "MOESAIC_PLACEMENT_POLICY": "keep",
    "MOESAIC_REPLAN_INTERVAL_S": "3",
    "MOESAIC_LOAD_SHARE": "0.5",
}


@pytest.fixture(scope="session")
def right_answers(local: Any) -> RightAnswers:
    """What every site must answer."""
    return asyncio.run(RightAnswers.of(local.url))


@pytest.fixture(scope="session")
def tight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suite]:
    """Three agents, two of which hold few of the experts, and none of them has spares."""
    with running(tmp_path_factory.mktemp("tight"), *TIGHT, settings=SETTINGS) as suite:
        yield suite


@pytest.fixture(scope="session")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suite]:
    """Three agents with most of the experts each, which stay where they are until a policy is set."""
    flags = (*QUICK, "--agents", "3", "--memory", "80M,80M,80M")
    with running(tmp_path_factory.mktemp("roomy"), *flags, settings=SETTINGS | MOVING) as suite:
        yield suite
