"""Suites of real processes, each shared by the tests that want its topology."""

import asyncio
import gzip
import random
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.suites import CLINC_DOMAIN, DEMO, Suite, running
from tests.system.asking import QUESTIONS, of_load


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
def disaggregated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suite]:
    """One attention worker, two expert workers."""
    with running(tmp_path_factory.mktemp("disaggregated")) as suite:
        yield suite


@pytest.fixture(scope="session")
def spare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suite]:
    """Two attention workers, three expert workers of which any one has room for all experts; to be killed."""
    flags = ("--attention", "2", "--experts", "3", "--slots-per-layer", "32")
    settings = {"MOESAIC_MIN_EPOCH_INTERVAL_S": "0"}  # workers leave one after the other
    with running(tmp_path_factory.mktemp("spare"), *flags, settings=settings) as suite:
        yield suite


@pytest.fixture(scope="session")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suite]:
    """One attention worker that computes the experts itself."""
    with running(tmp_path_factory.mktemp("local"), "--topology", "local") as suite:
        yield suite


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suite]:
    """Two attention workers, three expert workers."""
    with running(tmp_path_factory.mktemp("wide"), "--attention", "2", "--experts", "3") as suite:
        yield suite


@pytest.fixture(scope="session")
def right(local: Suite) -> list[str]:
    """The answers of one process that holds all experts to the questions of a load."""

    async def asked() -> list[str]:
        async with httpx.AsyncClient(base_url=local.url, timeout=60) as client:
            outcomes = [await of_load(client, number) for number in range(QUESTIONS)]
        assert all(outcome.error is None for outcome in outcomes)
        return [outcome.text for outcome in outcomes]

    return asyncio.run(asked())
