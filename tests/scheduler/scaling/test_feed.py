"""Load of the fleet, as workers report it over Redis."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from moesaic.cluster.leadership import Leadership
from moesaic.cluster.load_view import STREAM
from moesaic.cluster.redis.bus import Bus
from moesaic.costs.book import CostBook
from moesaic.messages.performance import Arrival, RequestLatency, LoadReport
from moesaic.scaling.contract import Objectives
from moesaic.services.scheduler.scaling.feed import LoadFeed

NOW = 1000.0
TARGETS = Objectives(ttft_s=0.2, tpot_s=0.05)
LEADING = cast(Leadership, SimpleNamespace(held=True))


def report(worker_id: str = "attention-0", at: float = NOW - 1, **fields: Any) -> LoadReport:
    known = {"generation": 1, "role": "attention", "window_s": 1.0} | fields
    return LoadReport(worker_id=worker_id, at=at, **known)


def feed(*reports: LoadReport) -> LoadFeed:
    made = LoadFeed(cast(Bus, None), LEADING, lambda: NOW)
    for each in reports:
        made.take(each)
    return made


def test_nothing_is_measured_without_reports() -> None:
    measured = feed().measured(60, TARGETS)

    assert (measured.attainment, measured.ttft_p90_s, measured.waiting) == (None, None, 0)


def test_answers_are_in_time_if_both_targets_are_met() -> None:
    answers = [
        RequestLatency(0.1, 0.04),
        RequestLatency(0.3, 0.04),
        RequestLatency(0.1, 0.06),
        RequestLatency(0.1),
    ]

    measured = feed(report(latencies=answers, ended=4)).measured(60, TARGETS)

    assert measured.attainment == 0.5
    assert (measured.ttft_p90_s, measured.tpot_p90_s) == (0.3, 0.06)


def test_answers_of_a_report_that_names_some_stand_for_all_of_its_own() -> None:
    busy = report("attention-0", latencies=[RequestLatency(0.1)], ended=9)
    slow = report("attention-1", latencies=[RequestLatency(0.9)], ended=1)

    measured = feed(busy, slow).measured(60, TARGETS)

    assert measured.attainment == pytest.approx(0.9)
    assert measured.ttft_p90_s == 0.1


def test_only_the_window_counts_and_only_the_last_queue_of_each_worker() -> None:
    old = report(at=NOW - 90, waiting=50, latencies=[RequestLatency(9.0)], ended=1)
    before, now = report(at=NOW - 5, waiting=7), report(at=NOW - 1, waiting=2)
    other = report("attention-1", at=NOW - 2, waiting=3)

    measured = feed(old, before, now, other).measured(60, TARGETS)

    assert (measured.attainment, measured.waiting) == (None, 5)


def test_a_report_that_is_told_again_counts_once() -> None:
    told = report(latencies=[RequestLatency(0.9)], ended=1)

    assert len(feed(told, told).recent(60)) == 1


def test_costs_are_those_of_all_workers_also_of_one_that_rests_now() -> None:
    first, second = CostBook(), CostBook()
    for rows in (1, 2, 3, 4):
        first.add("head", (1, rows), 0.001 + 0.002 * rows)
        second.add("head", (1, rows), 0.001 + 0.002 * rows)
    reports = (
        report(at=NOW - 600, costs=first.sums()),
        report("attention-1", costs=second.sums()),
    )

    model = feed(*reports).model()

    assert model.parts["head"].samples > first.model().parts["head"].samples
    assert model.at("head", (1, 10)).seconds == pytest.approx(0.021, rel=0.05)


async def test_a_leader_reads_what_workers_tell_over_redis(suite: Any) -> None:
    told = LoadFeed(suite.bus, LEADING, lambda: NOW)
    before, after = report(arrivals=[Arrival(NOW - 2, 12, 24)], arrived=1), report("attention-1")
    await suite.bus.append(STREAM, before)
    reading = asyncio.create_task(told.run())
    await suite.bus.append(STREAM, after)
    while len(told.recent(60)) < 2:
        await asyncio.sleep(0.01)
    reading.cancel()

    assert told.recent(60) == [before, after]
