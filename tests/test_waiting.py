"""Waits leave the cores to those that they wait for."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from tests import waiting

Wait = Callable[[Callable[[], object]], object]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that a clock tells, and behind them all pauses; time passes with pauses alone."""
    told = [0.0]

    def pause(seconds: float) -> None:
        told.append(seconds)
        told[0] += seconds

    async def pause_task(seconds: float) -> None:
        pause(seconds)

    monkeypatch.setattr(waiting, "time", SimpleNamespace(monotonic=lambda: told[0], sleep=pause))
    monkeypatch.setattr(waiting, "asyncio", SimpleNamespace(sleep=pause_task))
    return told


@pytest.fixture(params=["eventually", "until"])
def wait(request: pytest.FixtureRequest) -> Wait:
    """Both ways to wait."""
    if request.param == "eventually":
        return waiting.eventually
    return lambda condition: asyncio.run(waiting.until(condition))


def test_looks_that_take_long_are_farther_apart(clock: list[float], wait: Wait) -> None:
    looks = [0.001, 0.1, 5.0, 0.0]

    def is_there() -> bool:
        clock[0] += (took := looks.pop(0))
        return not took

    wait(is_there)

    assert clock[1:] == pytest.approx([0.01, 0.2, 0.5])


def test_a_wait_that_hangs_says_what_for(clock: list[float], wait: Wait) -> None:
    def nothing() -> int:
        return 0

    with pytest.raises(AssertionError, match=r"after 300 s this still gives 0: def nothing"):
        wait(nothing)
