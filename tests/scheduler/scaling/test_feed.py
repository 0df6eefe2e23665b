"""Load of the fleet, as workers report it over Redis."""

import asyncio
import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from moesaic.cluster.leadership import Leadership
from moesaic.cluster.load_view import STREAM
from moesaic.cluster.redis.bus import Bus
from moesaic.costs import CostBook
from moesaic.messages.performance import Arrival, FitSums, LoadReport, RequestLatency
from moesaic.scaling.contract import Objectives
from moesaic.services.scheduler.scaling.feed import LoadFeed

NOW = 1000.0
TARGETS = Objectives(ttft_s=0.2, tpot_s=0.05)
WORKERS = ("attention-0", "attention-1")
LEADING = cast("Leadership", SimpleNamespace(held=True))


def report(worker_id: str = "attention-0", at: float = NOW - 1, **fields: Any) -> LoadReport:
    known = {"generation": 1, "role": "attention", "window_s": 1.0} | fields
    return LoadReport(worker_id=worker_id, at=at, **known)


class Clock:
    """The time of day."""

    now = NOW

    def __call__(self) -> float:
        return self.now


def feed(*reports: LoadReport, clock: Clock | None = None) -> LoadFeed:
    made = LoadFeed(cast("Bus", None), LEADING, clock or Clock())
    for each in reports:
        made.take(each)
    return made


def test_nothing_is_measured_without_reports() -> None:
    measured = feed().measured(60, TARGETS, WORKERS)

    assert (measured.attainment, measured.ttft_p90_s, measured.waiting) == (None, None, 0)


def test_answers_are_in_time_if_both_targets_are_met() -> None:
    answers = [
        RequestLatency(0.1, 0.04),
        RequestLatency(0.3, 0.04),
        RequestLatency(0.1, 0.06),
        RequestLatency(0.1),
    ]

    measured = feed(report(latencies=answers, ended=40)).measured(60, TARGETS, WORKERS)

    assert measured.attainment == 0.5
    assert (measured.ttft_p90_s, measured.tpot_p90_s) == (0.3, 0.06)


def test_answers_of_a_report_that_names_some_stand_for_all_of_its_own() -> None:
    busy = report("attention-0", latencies=[RequestLatency(0.1)], ended=9)
    slow = report("attention-1", latencies=[RequestLatency(0.9)], ended=1)

    measured = feed(busy, slow).measured(60, TARGETS, WORKERS)

    assert measured.attainment == pytest.approx(0.9)
    assert measured.ttft_p90_s == 0.1


def test_only_the_window_counts_and_only_the_last_queue_of_each_worker() -> None:
    old = report(at=NOW - 90, waiting=50, latencies=[RequestLatency(9.0)], ended=1)
    before, now = report(at=NOW - 5, waiting=7), report(at=NOW - 1, waiting=2)
    other = report("attention-1", at=NOW - 2, waiting=3)

    measured = feed(old, before, now, other).measured(60, TARGETS, WORKERS)

    assert (measured.attainment, measured.waiting) == (None, 5)


def test_a_few_answers_say_nothing() -> None:
    slow = report(latencies=[RequestLatency(9.0)] * 9, ended=9)

    assert feed(slow).measured(60, TARGETS, WORKERS).attainment is None


def test_what_ended_before_a_moment_does_not_count_after_it() -> None:
    slow = report(at=NOW - 9, latencies=[RequestLatency(9.0)], ended=50)
    fast = report(at=NOW - 1, latencies=[RequestLatency(0.1)], ended=50)
    told = feed(slow, fast)

    assert told.measured(60, TARGETS, WORKERS, NOW - 11).attainment == 0.5
    assert told.measured(60, TARGETS, WORKERS, NOW - 9.5).attainment == 1.0


def test_requests_of_workers_that_left_or_are_silent_do_not_wait() -> None:
    told = feed(
        report(waiting=3), report("attention-1", NOW - 30, waiting=5), report("gone", waiting=7)
    )

    assert told.measured(60, TARGETS, WORKERS).waiting == 3


def test_a_worker_is_heard_as_long_as_it_reports_whatever_its_clock_says() -> None:
    clock = Clock()
    told = feed(report("attention-1", NOW - 30), clock=clock)  # told before this scheduler led
    told.is_caught_up = True
    told.take(report(at=NOW - 30))

    assert (told.heard(["attention-0"]), told.heard(["attention-1"])) == (True, False)
    assert not told.heard(["attention-0", "new"])
    clock.now += 7
    assert not told.heard(["attention-0"])


def test_what_nobody_asks_for_any_more_is_forgotten() -> None:
    clock = Clock()
    told = feed(clock=clock)
    sums = one_cost()
    for number in range(5000):
        clock.now = NOW + number
        told.take(report(f"worker-{number}", at=clock.now, costs=sums))

    assert len(told.recent(120)) == 121  # the window of a policy that says nothing else
    samples = told.model().parts["head"].samples
    clock.now += 3599.5
    assert told.model().parts["head"].samples < samples / 1000
    told.take(report("last", at=clock.now))
    assert len(told.recent(86400)) == 1


def test_reports_are_in_the_order_in_which_they_came() -> None:
    ahead, set_right = report(at=NOW + 30, waiting=9), report(at=NOW, waiting=1)
    told = feed(ahead, set_right)

    assert told.measured(60, TARGETS, WORKERS).waiting == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"at": math.nan},
        {"at": math.inf},
        {"at": NOW + 9999},
        {"window_s": math.inf},
        {"arrivals": [Arrival(NOW, 2**63, 1)]},
        {"arrivals": [Arrival(math.nan, 1, 1)]},
        {"arrivals": [Arrival(NOW, 1, -1)]},
        {"latencies": [RequestLatency(math.nan)]},
        {"latencies": [RequestLatency(math.inf, math.nan)]},
        {"latencies": [RequestLatency(-1.0)]},
    ],
)
def test_a_report_that_cannot_be_true_is_left_out(wrong: dict[str, Any]) -> None:
    told = feed(report(**wrong))

    assert told.recent(60) == []
    assert not told.heard(["attention-0"])


@pytest.mark.parametrize(("failed", "p90_s"), [(1, 0.1), (5, None)])
def test_requests_that_failed_have_missed_their_targets(failed: int, p90_s: float | None) -> None:
    latencies = [RequestLatency(math.inf)] * failed + [RequestLatency(0.1)] * (20 - failed)
    told = feed(report(latencies=latencies, ended=20))

    found = told.measured(60, TARGETS, WORKERS)

    assert found.attainment == pytest.approx(1 - failed / 20)
    assert found.ttft_p90_s == p90_s
    assert told.heard(["attention-0"])


def test_numbers_that_no_report_can_have_are_cut() -> None:
    sums = one_cost()
    broken = {"head": replace(sums["head"], squares=math.nan)}
    told = feed(report(arrivals=[Arrival(NOW, 1, 1)], arrived=10**9, ended=10**12, costs=broken))

    [kept] = told.recent(60)
    assert (kept.arrived, kept.ended) == (10_000, 10_000)
    assert told.model().parts == {}


def one_cost() -> dict[str, FitSums]:
    book = CostBook()
    for rows in (1, 2, 3, 4):
        book.add("head", (1, rows), 0.001 + 0.002 * rows)
    return book.sums()


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

    assert model.parts["head"].samples > first.fit("head").weight
    assert model.at("head", (1, 10)).seconds == pytest.approx(0.021, rel=0.05)


async def test_a_leader_reads_what_workers_tell_over_redis_and_knows_when_it_has_caught_up(
    control: Any,
) -> None:
    told = LoadFeed(control.bus, LEADING, lambda: NOW)
    before = [report(at=NOW - 50 + n) for n in range(40)]
    before.append(report(arrivals=[Arrival(NOW - 2, 12, 24)], arrived=1))
    for each in before:
        await control.bus.append(STREAM, each)
    reading, seen = asyncio.create_task(told.run()), set[tuple[bool, bool]]()
    while len(told.recent(60)) < len(before):
        seen.add((told.is_caught_up, len(told.recent(60)) == len(before)))
        await asyncio.sleep(0)
    assert told.is_caught_up
    assert (True, False) not in seen

    await control.bus.append(STREAM, report("attention-1"))
    while len(told.recent(60)) < len(before) + 1:
        await asyncio.sleep(0.01)
    reading.cancel()

    assert told.recent(60) == [*before, report("attention-1")]


async def test_a_leader_of_a_fleet_that_has_told_nothing_has_caught_up_at_once(
    control: Any,
) -> None:
    told = LoadFeed(control.bus, LEADING, lambda: NOW)
    reading = asyncio.create_task(told.run())
    while not told.is_caught_up:
        await asyncio.sleep(0.01)
    reading.cancel()
