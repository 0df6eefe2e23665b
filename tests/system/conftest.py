"""Suites of real processes, each shared by the tests that want its topology."""

import asyncio
import gzip
import random
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.suites import CLINC_DOMAIN, DEMO, Suite
from tests.system.asking import QUESTIONS, of_load
from tests.system.shared_suites import LOCAL, PAIR, SharedSuites
from tests.waiting import HANG_S


@pytest.fixture(scope="session")
def demo() -> Path:
    """The demo checkpoint's directory."""
    return DEMO


@pytest.fixture(scope="session")
def clinc_domain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The clinc_domain test split, shuffled so that its first rows are of all kinds."""
    with gzip.open(CLINC_DOMAIN, "rt", encoding="utf-8") as file:
        rows = file.readlines()
    random.Random(0).shuffle(rows)
    path = tmp_path_factory.mktemp("rows") / "clinc_domain.jsonl"
    path.write_text("".join(rows), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def suites(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedSuites]:
    """Suites of this process of tests; a test takes those it wants by fixtures."""
    shared = SharedSuites(tmp_path_factory)
    yield shared
    shared.close()


@pytest.fixture
def disaggregated(suites: SharedSuites) -> Suite:
    """One attention worker, two expert workers."""
    return suites.get("disaggregated")


@pytest.fixture
def spare(suites: SharedSuites) -> Suite:
    """Two attention workers, three expert workers of which any one has room for all experts; to be killed."""
    flags = ("--attention", "2", "--experts", "3", "--slots-per-layer", "32")
    settings = {"MOESAIC_MIN_EPOCH_INTERVAL_S": "0"}  # workers leave one after the other
    return suites.get("spare", *flags, settings=settings)


@pytest.fixture
def local(suites: SharedSuites) -> Suite:
    """One attention worker that computes the experts itself."""
    return suites.get(*LOCAL)


@pytest.fixture
def wide(suites: SharedSuites) -> Suite:
    """Two attention workers, three expert workers."""
    return suites.get("wide", "--attention", "2", "--experts", "3")


@pytest.fixture
def pair(suites: SharedSuites) -> Suite:
    """Two attention workers that compute the experts themselves."""
    return suites.get(*PAIR)


@pytest.fixture
def gathered(suites: SharedSuites) -> Suite:
    """Two attention workers with half of the experts each."""
    return suites.get("gathered", "--topology", "gathered", "--attention", "2")


@pytest.fixture(scope="session")
def right(suites: SharedSuites) -> list[str]:
    """The answers of one process that holds all experts to the questions of a load."""
    url = suites.get(*LOCAL).url

    async def asked() -> list[str]:
        async with httpx.AsyncClient(base_url=url, timeout=HANG_S) as client:
            outcomes = [await of_load(client, number) for number in range(QUESTIONS)]
        assert all(outcome.error is None for outcome in outcomes)
        return [outcome.text for outcome in outcomes]

    return asyncio.run(asked())
