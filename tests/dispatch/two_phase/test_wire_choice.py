"""``--wire-dtype auto`` packs rows where links are slow, and only there."""

import itertools
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from moesaic.dispatch.two_phase import wire_choice
from moesaic.dispatch.two_phase.wire_choice import WireChooser, packing_s, wire_for

ROWS = 9


@pytest.mark.parametrize(
    ("mbit", "packing_us", "wire"),
    [(100, 2.0, "int8"), (1000, 2.0, "int8"), (10_000, 2.0, "int8"), (10_000, 3.0, "own")],
)
def test_packing_must_be_outweighed_twice(mbit: int, packing_us: float, wire: str) -> None:
    assert wire_for(mbit * 1e6 / 8, 8192 - 2052, packing_us * 1e-6) == wire


def test_packing_takes_time() -> None:
    assert 0 < packing_s(64) < 1


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packing costs nothing here, so any bytes weigh more; and there is no pause between measurements."""
    monkeypatch.setattr(wire_choice, "packing_s", lambda hidden_size: 0.0)
    monkeypatch.setattr(wire_choice, "_PAUSE_S", 0.0)


async def test_rows_take_another_form_as_soon_as_it_is_chosen(open_lab: Any) -> None:
    async with open_lab("tcp", ["a"], ["x", "x"], "relay") as lab:
        [worker] = lab.attention
        tell = worker.dispatcher.set_wire, worker.two_phase.set_wire
        route = partial(worker.dispatcher.route_of, 1)
        chooser = WireChooser("a", 32, torch.float32, route, tell, lambda: 0)
        exact = await lab.step(0, ROWS)

        assert await chooser.look() == "int8"

        packed = await lab.step(0, ROWS)
        worker.two_phase.steps.direct_until_s = math.inf
        for form in (packed, await lab.step(0, ROWS)):
            for right, got in zip(exact, form, strict=True):
                assert 0 < (got - right).norm() / right.norm() < 0.05
        assert await chooser.look() is None  # the same links


async def test_links_inside_a_node_are_not_packed_for(open_lab: Any) -> None:
    async with open_lab("inprocess", ["a"], ["a", "a"], "direct") as lab:
        chosen: list[str] = []
        route = partial(lab.attention[0].dispatcher.route_of, 1)
        chooser = WireChooser("a", 32, torch.float32, route, [chosen.append], lambda: 0)

        assert await chooser.look() is None

        assert chosen == []


async def test_nothing_is_chosen_by_answers_that_waited_for_steps(open_lab: Any) -> None:
    async with open_lab("tcp", ["a"], ["x", "x"], "relay") as lab:
        [worker] = lab.attention
        chosen: list[str] = []
        sent: Iterator[int] = itertools.count()
        route = partial(worker.dispatcher.route_of, 1)
        chooser = WireChooser("a", 32, torch.float32, route, [chosen.append], lambda: next(sent))

        assert await chooser.look() is None
        assert chosen == []

        sent = itertools.repeat(0)
        assert await chooser.look() == "int8"
