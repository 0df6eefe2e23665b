"""Recent demand from reports of workers whose clocks differ."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.errors import InvalidInput
from moesaic.messages.performance import Arrival, LoadReport
from moesaic.scaling import recent_demand, reported_arrivals


def report_of(arrivals: list[Arrival], arrived: int, at: float = 100.0) -> LoadReport:
    return LoadReport(
        worker_id="a",
        generation=1,
        role="attention",
        at=at,
        window_s=10.0,
        arrivals=arrivals,
        arrived=arrived,
    )


def test_requests_of_the_window_are_in_order_and_others_are_left_out() -> None:
    arrivals = [Arrival(95.0, 30, 3), Arrival(91.0, 20, 2), Arrival(89.0, 10, 1)]

    found = recent_demand(arrivals, now_s=100.0, window_s=10.0, usual_answer_tokens=7)

    assert found.at_s.tolist() == [1.0, 5.0]
    assert found.prompt_tokens.tolist() == [20, 30]
    assert found.answer_tokens.tolist() == [2, 3]
    assert found.requests_per_s == 0.2


def test_cached_tokens_need_not_be_computed_but_the_last_one_always() -> None:
    arrivals = [Arrival(95.0, 30, 3, 10), Arrival(96.0, 30, 3, 30)]

    found = recent_demand(arrivals, 100.0, 10.0, 7)

    assert found.prompt_tokens.tolist() == [20, 1]


def test_answers_that_are_not_known_yet_have_the_usual_length() -> None:
    found = recent_demand([Arrival(95.0, 30, 0)], 100.0, 10.0, 7.4)

    assert found.answer_tokens.tolist() == [7]


def test_what_comes_by_a_clock_ahead_came_now_unless_the_clock_is_far_off() -> None:
    found = recent_demand([Arrival(101.0, 30, 1), Arrival(9999.0, 30, 1)], 100.0, 10.0, 7)

    assert found.at_s.tolist() == [10.0]


@pytest.mark.parametrize(
    ("window_s", "usual", "field"), [(0.0, 7, "window_s"), (1.0, 0, "usual_answer_tokens")]
)
def test_a_window_without_length_and_answers_without_tokens_are_refused(
    window_s: float, usual: float, field: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        recent_demand([], 100.0, window_s, usual)

    assert caught.value.field == field


@given(st.integers(1, 20), st.integers(0, 60))
def test_named_arrivals_stand_for_all_that_came(num_named: int, more: int) -> None:
    named = [Arrival(90.0 + i / 4, 10 + i, 1) for i in range(num_named)]

    found = reported_arrivals([report_of(named, num_named + more)])

    assert len(found) == num_named + more
    counts = [sum(each.prompt_tokens == one.prompt_tokens for each in found) for one in named]
    assert max(counts) - min(counts) <= 1
    assert [each.at for each in found] == sorted(each.at for each in found)


def test_reports_that_name_all_arrivals_are_taken_as_they_are() -> None:
    named = [Arrival(90.0, 10, 1), Arrival(91.0, 11, 0)]

    found = reported_arrivals([report_of(named, 2), report_of([], 5), report_of(named, 1)])

    assert found == named * 2


def test_what_reports_say_came_is_bounded_over_all_of_them() -> None:
    named = [Arrival(90.0, 10, 1), Arrival(91.0, 10, 1)]

    found = reported_arrivals([report_of(named, 60_000), report_of(named, 10**9)])

    assert len(found) == 60_000 + 2
