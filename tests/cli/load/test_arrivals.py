"""Times at which requests of a load are due."""

import math
from datetime import datetime

import numpy as np
import pytest

from moesaic.cli.load.arrivals import RampUp, due_times


@pytest.mark.parametrize("burstiness", [0.3, 1.0, 5.0, math.inf])
def test_arrivals_have_the_rate_and_the_burstiness_that_were_asked_for(burstiness: float) -> None:
    due = due_times(4000, 8.0, burstiness, seed=3)
    gaps = np.diff([0.0, *due])

    assert due[-1] == pytest.approx(500)
    assert gaps.min() >= 0
    # A Gamma distribution's standard deviation is its mean over the root of its shape.
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.1, abs=1e-9)
    assert due == due_times(4000, 8.0, burstiness, seed=3)


@pytest.mark.parametrize(
    ("ramp_up", "middle"), [(RampUp("linear", 2, 8), 5), (RampUp("exponential", 2, 8), 4)]
)
def test_the_rate_of_a_ramp_up_grows_from_the_first_to_the_last(
    ramp_up: RampUp, middle: float
) -> None:
    even = 1 / np.diff([0.0, *due_times(101, math.inf, math.inf, 0, ramp_up)])

    assert even[[0, 50, 100]] == pytest.approx([2, middle, 8])
    assert (np.diff(even) > 0).all()
    drawn = np.diff(due_times(4000, math.inf, 1.0, 0, ramp_up))
    assert 1 / drawn[:400].mean() == pytest.approx(2.3, rel=0.25)
    assert 1 / drawn[-400:].mean() == pytest.approx(7.5, rel=0.25)


def test_each_whole_rate_of_a_ramp_up_is_told_once() -> None:
    ramp_up, began = RampUp("linear", 2, 6.5), datetime(2026, 1, 2, 3, 4, 5)
    due = due_times(10, math.inf, math.inf, 0, ramp_up)

    changes = ramp_up.changes(due, began)

    assert [each["rps"] for each in changes] == [2, 3, 4, 5, 6]
    assert changes[0]["timestamp"] == "2026-01-02T03:04:05"
    assert [each["timestamp"] for each in changes] == sorted(each["timestamp"] for each in changes)


def test_a_ramp_up_may_begin_below_one_and_have_one_request() -> None:
    assert due_times(1, math.inf, math.inf, 0, RampUp("exponential", 0.5, 4)) == [2.0]
    changes = RampUp("linear", 0.5, 2.0).changes([0.0, 1.0], datetime(2026, 1, 1))
    assert [each["rps"] for each in changes] == [0.5, 1, 2]
