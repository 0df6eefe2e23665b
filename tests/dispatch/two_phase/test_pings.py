"""What links to other nodes cost is measured beside steps, for the performance model."""

from typing import Any

import pytest

from moesaic.dispatch.two_phase import pings
from moesaic.dispatch.two_phase.pings import BURST, MEASUREMENTS, LinkTimes, best, slowest
from moesaic.dispatch.two_phase.way import MANY_ROWS
from tests.dispatch.two_phase.conftest import offer_again


def test_the_best_of_several_measurements_counts_and_the_slowest_of_several_links() -> None:
    near = [LinkTimes(1, 5, 10), LinkTimes(2, 4, 20)]
    far = [LinkTimes(3, 2, 90), LinkTimes(4, 1, 80)]

    assert best(near) == LinkTimes(1, 4, 10)
    assert slowest([best(near), best(far)]) == LinkTimes(3, 4, 80)


async def test_steps_teach_the_performance_model_what_a_link_costs(
    open_lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def measured(link: Any) -> LinkTimes:
        links.append(link)
        return LinkTimes(0.003, 0.003 + 0.001 * (BURST - 1), 1e-8)

    links = list[Any]()
    monkeypatch.setattr(pings, "measure_link", measured)
    monkeypatch.setattr(pings, "_PAUSE_S", 0.01)
    async with open_lab("inprocess", ["a", "a"], ["x", "x", "y"], "auto") as lab:
        first, second = (worker.two_phase for worker in lab.attention)
        while not first.pings.book.sums():
            await lab.check([4, 4])

        assert set(lab.attention[0].dispatcher.costs.sums()) == {"link.inter"}
        link = first.pings.book.fit("link.inter").cost()
        assert link.seconds(1, 2, 1000) == pytest.approx(0.003 + 0.001 + 1e-5, rel=0.01)
        assert not second.pings.book.sums()  # its lead measures for the node
        route = lab.attention[0].dispatcher.route_of(1)
        assert links[:2] == [route.links[0], route.links[2]]  # one to each node


async def test_a_lead_without_rows_measures_for_its_neighbours(
    open_lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pings, "_PAUSE_S", 0.01)
    async with open_lab("inprocess", ["a", "a"], ["x", "x"], "auto") as lab:
        lead = lab.attention[0].two_phase
        while not lead.pings.book.sums():
            offer_again(lab.attention[1])
            await lab.step(1, MANY_ROWS)


async def test_links_are_measured_again_after_a_failure_of_any_kind(
    open_lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another version answered could not be read, and nothing was ever measured again."""
    tried: list[int] = []
    measure_link = pings.measure_link

    async def fails_once(link: Any) -> LinkTimes:
        tried.append(1)
        if len(tried) == 1:
            raise ValueError("of any kind")
        return await measure_link(link)

    monkeypatch.setattr(pings, "measure_link", fails_once)
    monkeypatch.setattr(pings, "_RETRY_S", (0.01, 0.01))
    monkeypatch.setattr(pings, "_PAUSE_S", 0.01)
    async with open_lab("inprocess", ["a"], ["x", "x"], "auto") as lab:
        while not lab.attention[0].two_phase.pings.book.sums():
            await lab.check([4])

        assert len(tried) >= 2


async def test_links_are_not_measured_again_for_another_placement_of_the_same_workers(
    open_lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[Any] = []

    async def at_once(link: Any) -> LinkTimes:
        measured.append(link)
        return LinkTimes(1e-3, 1e-3, 1e-8)

    monkeypatch.setattr(pings, "measure_link", at_once)
    monkeypatch.setattr(pings, "_PAUSE_S", 0.01)
    async with open_lab("inprocess", ["a", "a"], ["x", "x"], "auto") as lab:
        while len(measured) < MEASUREMENTS:
            await lab.check([4, 4])

        lab.place(epoch=2)
        await lab.linked()
        await lab.check([4, 4])

        assert lab.attention[0].dispatcher.epoch == 2
        assert len(measured) == MEASUREMENTS
        await lab.add_expert(2)
        lab.expert_nodes = [*lab.expert_nodes, "y"]
        lab.place(epoch=3)
        while len(measured) == MEASUREMENTS:
            await lab.check([4, 4])
        assert lab.attention[0].dispatcher.epoch == 3
