"""Algorithm 2 of the paper: its rule, and its bounds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.brownout.control.contract import EXACT, Latency, Phase, Thresholds
from moesaic.brownout.control.latencies import LatencyWindow, percentile_90
from moesaic.brownout.control.paper import next_threshold, paper_thresholds
from moesaic.messages.brownout import BrownoutPolicy

POLICY = BrownoutPolicy(mode="paper")


def windows(*shares: float, at_s: float = 0.0) -> dict[Phase, LatencyWindow]:
    found: dict[Phase, LatencyWindow] = {
        "prefill": LatencyWindow(5.0),
        "decode": LatencyWindow(5.0),
    }
    for share in shares:
        found["prefill"].add(Latency(at_s, share, share))
    return found


@pytest.mark.parametrize(
    ("share", "expected"),
    [(None, 0.5), (0.79, 0.6), (0.8, 0.5), (1.0, 0.5), (1.01, 0.4), (100.0, 0.4)],
)
def test_a_threshold_grows_below_the_warning_and_shrinks_above_the_target(
    share: float | None, expected: float
) -> None:
    assert next_threshold(0.5, share, POLICY) == pytest.approx(expected)


def test_ten_increments_of_a_tenth_end_at_exactly_one() -> None:
    threshold = 0.0
    for _ in range(10):
        threshold = next_threshold(threshold, 0.1, POLICY)
    assert threshold == next_threshold(threshold, 0.1, POLICY) == 1.0


@given(st.lists(st.floats(0, 1e6), min_size=1))
def test_90_of_100_latencies_do_not_exceed_the_percentile(values: list[float]) -> None:
    found = percentile_90(values)

    assert found in values
    assert sum(value <= found for value in values) * 10 >= 9 * len(values)
    assert sum(value < found for value in values) * 10 < 9 * len(values)


def test_an_empty_window_holds() -> None:
    old = windows(3.0, at_s=-6.0)

    assert paper_thresholds(POLICY, 0.0, Thresholds(0.3, 0.7), windows()) == (0.3, 0.7)
    assert paper_thresholds(POLICY, 0.0, Thresholds(0.3, 0.7), old) == (0.3, 0.7)


def test_one_overload_is_answered_until_the_window_has_passed() -> None:
    found, at = windows(3.0), EXACT
    for _ in range(3):
        at = paper_thresholds(POLICY, 0.0, at, found)
    assert at == (pytest.approx(0.8**3), 1.0)

    assert paper_thresholds(POLICY, POLICY.window_s + 1, at, found) == at


def test_each_phase_goes_by_its_own_latencies() -> None:
    found = windows(0.1)
    found["decode"].add(Latency(0.0, 2.0, 2.0))

    assert paper_thresholds(POLICY, 0.0, Thresholds(0.5, 0.5), found) == (0.6, 0.4)


@given(
    shares=st.lists(st.none() | st.floats(0, 10), max_size=60),
    least=st.floats(0, 1),
    increment=st.floats(0.001, 1),
    shrink=st.floats(0.01, 0.99),
)
def test_thresholds_stay_within_their_bounds(
    shares: list[float | None], least: float, increment: float, shrink: float
) -> None:
    policy = BrownoutPolicy(
        mode="paper",
        min_prefill_threshold=least,
        increment=increment,
        shrink=shrink,
    ).checked()
    at = EXACT
    for i, share in enumerate(shares):
        found = windows(*([] if share is None else [share]), at_s=float(i))
        at = paper_thresholds(policy, float(i), at, found)
        assert least <= at.prefill <= 1
        assert at.decode == 1
