"""Sums are held for who collects them, in whatever order the two come, and not for ever."""

import asyncio
from typing import Any

import pytest

from moesaic.dispatch.two_phase import held_sums as holding
from moesaic.dispatch.two_phase.held_sums import HeldSums
from moesaic.errors import ExpertUnavailable, MoesaicError, Overloaded
from moesaic.transport.frame import Frame, FrameKind
from tests.waiting import until

TICKET = (b"step", 0, 1)
LONG_S = 3600.0  # a test that needs it to pass hangs
REPLY = Frame(kind=FrameKind.REPLY)


def compute() -> Frame:
    return REPLY


async def test_sum_and_collector_come_in_any_order() -> None:
    held = HeldSums()

    assert held.keep(TICKET, LONG_S, compute) is REPLY
    assert await held.collect(TICKET, LONG_S) is REPLY

    collecting = asyncio.ensure_future(held.collect(TICKET, LONG_S))
    await asyncio.sleep(0)
    held.keep(TICKET, LONG_S, compute)
    assert await collecting is REPLY
    assert not len(held)


@pytest.mark.parametrize("error", [ExpertUnavailable(0), RuntimeError("of any kind")])
async def test_a_failure_is_told_at_once_and_not_waited_for(error: Exception) -> None:
    held = HeldSums()

    def fails() -> Frame:
        raise error

    collecting = asyncio.ensure_future(held.collect(TICKET, LONG_S))
    await asyncio.sleep(0)
    with pytest.raises(type(error)):
        held.keep(TICKET, LONG_S, fails)

    with pytest.raises(MoesaicError):
        await collecting


async def test_what_nobody_collects_goes_after_a_while() -> None:
    held = HeldSums()
    held.keep(TICKET, 0.01, compute)

    await until(lambda: not len(held))

    assert await held.collect(TICKET, 0.0) is None
    assert not len(held)


async def test_rows_that_come_late_are_still_found_by_who_waits_as_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A slow link: what was held ten seconds only was lost to a batch that took longer."""
    held, delays, loop = HeldSums(), list[float](), asyncio.get_running_loop()
    call_later = loop.call_later

    def noted(delay: float, *what: Any) -> asyncio.TimerHandle:
        delays.append(delay)
        return call_later(delay, *what)

    monkeypatch.setattr(loop, "call_later", noted)
    collecting = asyncio.ensure_future(held.collect(TICKET, LONG_S))
    await asyncio.sleep(0)

    held.keep(TICKET, 10.0, compute)

    assert await collecting is REPLY
    assert min(delays) == LONG_S


async def test_there_is_an_end_to_what_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holding, "MAX_HELD", 1)
    held = HeldSums()
    held.keep(TICKET, LONG_S, compute)

    with pytest.raises(Overloaded):
        held.keep((b"step", 1, 1), LONG_S, compute)
    held.close()


async def test_closing_lets_go_of_everybody() -> None:
    held = HeldSums()
    collecting = asyncio.ensure_future(held.collect(TICKET, LONG_S))
    await asyncio.sleep(0)

    held.close()

    assert await collecting is None
    assert not len(held)
