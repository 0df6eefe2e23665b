"""Arrivals, violations and pictures of the burst, from made-up requests."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.brownout_burst.arms import policy_of
from benchmarks.brownout_burst.arrivals import RateStretch, arrivals, azure_gaps
from benchmarks.brownout_burst.figures import (
    BurstSample,
    BurstTargets,
    accuracy,
    arm_figures,
    p90,
    seconds_over,
    until_exact,
    until_in_time,
    violations,
)
from benchmarks.brownout_burst.picture import draw
from benchmarks.brownout_burst.point import BurstPoint
from benchmarks.brownout_burst.series import series_of
from moesaic.cli.load.generator import TimedRequest

TARGETS = BurstTargets(ttft_s=0.5, tpot_s=0.1)


def answered(
    due_s: float, ttft_s: float = 0.1, tpot_s: float = 0.05, right: bool = True
) -> TimedRequest:
    """A request with an answer of five tokens."""
    times = [due_s + ttft_s + tpot_s * n for n in range(5)]
    return TimedRequest(
        *(0, due_s, due_s, 200), end_s=times[-1], token_times=times, complete=True, right=right
    )


def refused(due_s: float) -> TimedRequest:
    return TimedRequest(0, due_s, due_s, 503, end_s=due_s)


def sample(at_s: float, threshold: float = 1.0, shedding: bool = False) -> BurstSample:
    return BurstSample(at_s, threshold, 1.0, shedding, 0)


def count(times: Sequence[float], start_s: float, end_s: float) -> int:
    return sum(start_s <= at < end_s for at in times)


def test_the_rate_of_the_trace_doubles_in_the_burst_and_falls_again() -> None:
    due = arrivals(
        azure_gaps(), [RateStretch(75, 16.0), RateStretch(175, 32.0), RateStretch(50, 16.0)]
    )

    assert due == sorted(due)
    assert [count(due, *part) for part in ((0, 75), (75, 250), (250, 300))] == [1200, 5600, 800]
    assert len(due) == 7600
    for half in (75.0, 162.5):  # the trace has its own ups and downs, and no jump as large
        assert count(due, half, half + 87.5) / 87.5 == pytest.approx(32, rel=0.25)


def test_gaps_within_a_stretch_keep_their_proportions() -> None:
    assert arrivals([1, 3, 2, 2], [RateStretch(8, 0.25), RateStretch(4, 0.5)]) == [0, 2, 8, 10]


def test_a_trace_that_is_used_up_begins_anew() -> None:
    assert arrivals([1, 3], [RateStretch(8, 0.5)]) == [0, 1, 4, 5]


def test_a_stretch_may_be_empty() -> None:
    assert arrivals([1.0], [RateStretch(0, 5), RateStretch(1, 1)]) == [0]


def test_a_violation_is_of_the_phase_that_was_late() -> None:
    requests = [answered(0), answered(0, ttft_s=0.6), answered(0, tpot_s=0.2), answered(0)]

    told = violations(requests, TARGETS)

    assert (told["prefill"], told["decode"], told["either"]) == (0.25, 0.25, 0.5)
    assert told["later_tokens"] == 0.25
    assert (told["shed"], told["failed"]) == (0, 0)


def test_a_request_that_was_refused_or_failed_violates_both_phases() -> None:
    broken = answered(0)
    broken.complete = False
    lost = TimedRequest(0, 0.0)  # no connection

    told = violations([answered(0), refused(0), broken, lost], TARGETS)

    assert (told["prefill"], told["decode"], told["either"]) == (0.75, 0.75, 0.75)
    assert (told["shed"], told["failed"]) == (0.25, 0.5)
    assert told["later_tokens"] == 0.75  # as many tokens each as the one answer has


def test_all_requests_may_be_refused() -> None:
    told = violations([refused(0), refused(1)], TARGETS)

    assert (told["either"], told["later_tokens"], told["shed"]) == (1, 1, 1)


def test_a_single_token_is_late_in_no_later_one() -> None:
    one = TimedRequest(0, 0.0, 0.0, 200, token_times=[0.4], complete=True)

    assert violations([one], TARGETS)["either"] == 0


def test_the_ninetieth_percentile_is_a_value_that_was_seen() -> None:
    assert [p90([3.0]), p90([float(n) for n in range(1, 11)]), p90([])] == [3, 9, 0]


def test_seconds_over_the_target_are_those_in_which_a_tenth_waited_too_long() -> None:
    fine = [answered(n / 20) for n in range(19)]
    late = [answered(1 + n / 20, ttft_s=0.6 if n < 3 else 0.1) for n in range(20)]
    in_vain = [answered(2 + n / 20) for n in range(10)] + [refused(2.9), refused(2.9)]

    over = seconds_over([*fine, *late, *in_vain], TARGETS)

    assert over == {"ttft": 2, "tpot": 1, "either": 2}


def test_seconds_until_exact_count_from_the_end_of_the_burst_to_the_last_return() -> None:
    samples = [sample(8), sample(9, 0.4), sample(11), sample(12, shedding=True), sample(13.5)]

    assert until_exact(samples, 10) == 3.5
    assert until_exact(samples[:3], 10) == 1
    assert until_exact(samples[:1], 10) == 0
    assert until_exact([sample(5, 0.2), sample(6), sample(11)], 10) == 0
    assert until_exact(samples[:2], 10) is None


def test_seconds_until_in_time_end_with_the_last_second_over_a_target() -> None:
    late = answered(11.5, ttft_s=2)

    assert until_in_time([answered(9), late, answered(14)], TARGETS, 10, 15) == 2
    assert until_in_time([late], TARGETS, 10, 12) is None
    assert until_in_time([answered(5, ttft_s=2), answered(11)], TARGETS, 10, 15) == 0


def test_right_answers_are_counted_among_the_given_and_the_asked() -> None:
    told = accuracy([answered(0), answered(0, right=False), refused(0), refused(0)])

    assert told == {"answered": 2, "right": 0.5, "right_of_asked": 0.25}


def test_arms_differ_in_their_control_alone() -> None:
    point = BurstPoint(way=4)
    none, paper, ours = (policy_of(arm, point, TARGETS) for arm in ("none", "paper", "ours"))

    assert [policy.mode for policy in (none, paper, ours)] == ["off", "paper", "auto"]
    paper.mode = ours.mode
    assert paper == ours
    assert (ours.way, ours.slo_ttft_s, ours.slo_tpot_s) == (4, 0.5, 0.1)


@pytest.fixture
def arm() -> tuple[list[TimedRequest], list[BurstSample], BurstPoint]:
    point = BurstPoint(calm_s=4, burst_s=4, tail_s=4)
    requests = [answered(n / 2, ttft_s=0.6 if 8 <= n < 16 else 0.1) for n in range(24)]
    requests[10] = refused(5.0)
    samples = [sample(n / 2, 0.5 if 8 <= n < 18 else 1.0) for n in range(24)]
    return requests, samples, point


def test_figures_of_an_arm_are_by_stretch(arm: Any) -> None:
    requests, samples, point = arm

    told = arm_figures(requests, samples, TARGETS, point)

    assert [told["violations"][part]["either"] for part in ("before", "burst", "after")] == [
        0,
        1,
        0,
    ]
    assert told["violations"]["burst"]["shed"] == 0.125
    assert told["until_exact_s"] == 1
    assert told["until_in_time_s"] == 0
    assert told["burst"]["prefill_threshold"] == 0.5
    assert told["accuracy"]["burst"] == {"answered": 7, "right": 1, "right_of_asked": 0.875}
    json.dumps(told, allow_nan=False)


def test_the_picture_is_drawn_from_the_result(arm: Any, tmp_path: Path) -> None:
    requests, samples, point = arm
    series = {name: series_of(requests, samples, point.end_s) for name in ("none", "paper", "ours")}
    series["paper"]["ttft_p90_s"][0] = None  # nobody was answered
    to = tmp_path / "burst.png"

    told = json.loads(json.dumps(series, allow_nan=False))
    targets = {"ttft_s": 0.5, "tpot_s": 0.1}
    config = {"calm_s": 4, "burst_end_s": 8}
    draw({"config": config, "figures": {"targets": targets}, "series": told}, to)

    assert to.read_bytes().startswith(b"\x89PNG")
    assert told["ours"]["due_per_s"] == [2] * 6
    assert told["ours"]["unanswered_per_s"] == [0, 0, 0.5, 0, 0, 0]
