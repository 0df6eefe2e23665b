"""Demand and costs of the fleet, as decisions are made from them."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from msgspec.structs import replace

from moesaic.cluster.leadership import Leadership
from moesaic.cluster.placement_view import PlacementView
from moesaic.cluster.redis.bus import Bus
from moesaic.cluster.registry import Fleet
from moesaic.costs import CostBook
from moesaic.messages.performance import Arrival, LoadReport
from moesaic.messages.registry import WorkerRecord
from moesaic.messages.scaling import FleetShape, ScalingPolicy
from moesaic.scaling.contract import Objectives, ScalingState, ShapeBounds, StepRows
from moesaic.services.scheduler.planning.traffic import TrafficFeed
from moesaic.services.scheduler.scaling.feed import LoadFeed
from moesaic.services.scheduler.scaling.predictor import (
    STEPS_FADE_S,
    FleetPredictor,
    activated_of,
    unevenness,
)

NOW = 1_000_000.0
POLICY = ScalingPolicy(mode="auto", window_s=60.0)
LEADING = cast("Leadership", SimpleNamespace(held=True))


def fleet_of(*names: str) -> Fleet:
    fleet = Fleet()
    fleet.workers = {
        name: WorkerRecord(
            worker_id=name, generation=1, role="attention", state="ready", admin_address=f"{name}:1"
        )
        for name in names
    }
    return fleet


def reports_of(name: str, begin: float, end: float, **fields: Any) -> list[LoadReport]:
    """One every two seconds, each with one request in its midst."""
    ends = np.arange(begin + 2, end + 1, 2.0)
    return [
        LoadReport(
            worker_id=name,
            generation=1,
            role="attention",
            at=at,
            window_s=2.0,
            arrivals=[Arrival(at - 1, 10, 4)],
            **{"arrived": 1} | fields,
        )
        for at in ends.tolist()
    ]


def predictor_of(fleet: Fleet, *reports: LoadReport, caught_up: bool = True) -> FleetPredictor:
    feed = LoadFeed(cast("Bus", None), LEADING, lambda: NOW)
    for each in reports:
        feed.take(each)
    feed.is_caught_up = caught_up
    view = cast("PlacementView", SimpleNamespace(current=None))
    return FleetPredictor(fleet, view, cast("TrafficFeed", None), feed, lambda: NOW)


def test_the_window_is_what_reports_cover() -> None:
    whole = predictor_of(fleet_of("a"), *reports_of("a", NOW - 80, NOW)).demand(POLICY)
    half = predictor_of(fleet_of("a"), *reports_of("a", NOW - 20, NOW)).demand(POLICY)

    assert (whole.window_s, whole.requests_per_s) == (60.0, 0.5)
    assert (half.window_s, half.requests_per_s) == (20.0, 0.5)
    assert half.at_s.tolist() == [1.0 + 2 * n for n in range(10)]


def test_times_of_which_nothing_was_told_are_not_times_without_requests() -> None:
    gap = [*reports_of("a", NOW - 60, NOW - 40), *reports_of("a", NOW - 10, NOW)]

    found = predictor_of(fleet_of("a"), *gap).demand(POLICY)

    assert (found.window_s, found.requests_per_s) == (30.0, 0.5)
    assert found.at_s.max() <= 30


def test_only_times_of_which_all_workers_told_count() -> None:
    told = [*reports_of("a", NOW - 60, NOW), *reports_of("b", NOW - 10, NOW)]

    found = predictor_of(fleet_of("a", "b"), *told).demand(POLICY)

    assert (found.window_s, found.requests_per_s) == (10.0, 1.0)


def test_a_worker_that_tells_nothing_does_not_hide_the_load_of_others() -> None:
    found = predictor_of(fleet_of("a", "b"), *reports_of("a", NOW - 60, NOW)).demand(POLICY)

    assert (found.window_s, found.requests_per_s) == (60.0, 0.5)


def test_without_reports_no_time_was_seen() -> None:
    assert predictor_of(fleet_of("a")).demand(POLICY).window_s == 0
    assert predictor_of(fleet_of()).demand(POLICY).window_s == 0


def test_many_more_requests_than_there_can_be_take_no_room() -> None:
    absurd = reports_of("a", NOW - 60, NOW, arrived=10**9)

    assert len(predictor_of(fleet_of("a"), *absurd).demand(POLICY)) <= 100_000 + len(absurd)


async def test_nothing_is_chosen_before_the_reports_of_earlier_times_were_read() -> None:
    state = ScalingState(
        now_s=NOW,
        shape=FleetShape(1, 0),
        action=None,
        bounds=ShapeBounds(FleetShape(2, 0), FleetShape(4, 0)),
        demand=predictor_of(fleet_of("a")).demand(POLICY),
        objectives=Objectives(1.0, 1.0),
    )

    early = await predictor_of(fleet_of("a"), caught_up=False).choose(POLICY, state)
    later = await predictor_of(fleet_of("a")).choose(POLICY, state)

    assert early is None
    assert later is not None


@pytest.mark.parametrize(
    ("served", "uneven"), [(None, 1.0), ((0, 0), 1.0), ((10, 80), 2.0), ((10, 10), 1.0)]
)
def test_the_worker_that_has_most_is_measured_against_the_mean(
    served: tuple[int, int] | None, uneven: float
) -> None:
    chosen = np.full((2, 16), 0.999_999_999)  # each row activates every expert: four of each worker

    assert unevenness(chosen, 8.0, served, 4) == pytest.approx(uneven)


def test_most_activated_experts_are_never_more_than_all() -> None:
    chosen = np.full((2, 16), 0.999_999_999)

    assert activated_of(chosen, 2.0)(4, 8.0) == pytest.approx(8.0)
    assert activated_of(chosen, 9.0)(4, 8.0) == pytest.approx(16.0)


def predicting(
    fleet: Fleet, *, parts: bool = False, wall_clock: Callable[[], float] = lambda: NOW
) -> FleetPredictor:
    """One that knows what whole steps cost, and maybe what their parts do."""
    book = CostBook()
    for rows in range(1, 9):
        book.add("step", (1.0, 0.0, 0.0, rows, 10.0 * rows, 0.0), 0.1 + 0.01 * rows)
        if parts:
            book.add("attention", (1.0, rows, 10.0 * rows, 0.0), 0.1)
            book.add("experts", (1.0, 1.0 * rows, 2.0 * rows), 0.001 * rows)
    feed = LoadFeed(cast("Bus", None), LEADING, lambda: NOW)
    for each in reports_of("a", NOW - 60, NOW, costs=book.sums()):
        feed.take(each)
    feed.is_caught_up = True
    layer = SimpleNamespace(tokens=np.full(8, 10.0), rows=40.0, batches=4.0)
    traffic = SimpleNamespace(statistics=SimpleNamespace(layers={0: layer}))
    placement = SimpleNamespace(model_digest="m", layers=[0], workers=[])
    return FleetPredictor(
        fleet,
        cast("PlacementView", SimpleNamespace(current=placement)),
        cast("TrafficFeed", SimpleNamespace(of=lambda digest: traffic, served=lambda placed: None)),
        feed,
        wall_clock,
    )


def experts(number: int) -> dict[str, WorkerRecord]:
    return {
        name: WorkerRecord(
            worker_id=name, generation=1, role="expert", state="ready", admin_address=f"{name}:1"
        )
        for name in ("e0", "e1")[:number]
    }


@pytest.mark.parametrize("num_experts", [0, 2])
async def test_whole_steps_say_nothing_about_fleets_with_expert_workers(num_experts: int) -> None:
    fleet = fleet_of("a")
    fleet.workers["a"] = replace(fleet.workers["a"], num_experts=8, top_k=2)
    fleet.workers |= experts(num_experts)
    predictor = predicting(fleet)
    state = ScalingState(
        now_s=NOW,
        shape=FleetShape(1, num_experts),
        action=None,
        bounds=ShapeBounds(FleetShape(1, num_experts), FleetShape(4, 2 * num_experts)),
        demand=predictor.demand(POLICY),
        objectives=Objectives(0.01, 0.01),
        attainment=0.0,
    )

    found = await predictor.choose(POLICY, state)

    if num_experts:
        assert found is not None
        assert "costs are not known yet" in found.reason
    else:
        assert found is None or found.forecast is not None


def test_whole_steps_are_enough_where_workers_have_their_own_experts() -> None:
    book = CostBook()
    for rows in range(1, 9):
        book.add("step", (1.0, 0.0, 0.0, rows, 10.0 * rows, 0.0), 0.1 + 0.01 * rows)
    fleet = fleet_of("a")
    fleet.workers["a"] = replace(
        fleet.workers["a"], num_experts=8, top_k=2, max_num_seqs=4, step_target_s=0.25
    )

    predictor = predictor_of(fleet, *reports_of("a", NOW - 60, NOW, costs=book.sums()))

    times = predictor.times()
    assert times is not None
    assert times.step(StepRows(0, 4, 40), FleetShape(1, 0)).seconds == pytest.approx(0.14, rel=0.01)
    assert predictor.limits().step_target_s == 0.25


def test_a_fleet_that_lost_its_expert_workers_is_predicted_by_whole_steps() -> None:
    book = CostBook()
    for rows in range(1, 9):
        book.add("step", (1.0, 0.0, 0.0, rows, 10.0 * rows, 0.0), 0.1 + 0.01 * rows)
        book.add("attention", (1.0, rows, 10.0 * rows, 0.0), 0.02)
        book.add("experts", (1.0, 1.0 * rows, 2.0 * rows), 0.001 * rows)
    fleet = fleet_of("a")
    fleet.workers["a"] = replace(fleet.workers["a"], num_experts=8, top_k=2)

    times = predictor_of(fleet, *reports_of("a", NOW - 60, NOW, costs=book.sums())).times()

    assert times is not None
    assert times.step(StepRows(0, 4, 40), FleetShape(1, 2)).seconds == pytest.approx(0.14, rel=0.01)


def test_steps_measured_before_a_change_of_shape_correct_predictions_of_that_shape() -> None:
    fleet, now_s = fleet_of("a"), NOW
    predictor = predicting(fleet, parts=True, wall_clock=lambda: now_s)

    def seconds(num_experts: int) -> float:
        times = predictor.times()
        assert times is not None
        return times.step(StepRows(0, 4, 40), FleetShape(1, num_experts)).seconds

    fleet.workers |= experts(1)
    assert seconds(1) == pytest.approx(0.14, rel=0.01)

    fleet.workers |= experts(2)

    assert seconds(1) == pytest.approx(0.14, rel=0.01)
    assert seconds(2) != pytest.approx(0.14, rel=0.01)
    now_s += STEPS_FADE_S
    assert seconds(2) == pytest.approx(0.14, rel=0.01)
