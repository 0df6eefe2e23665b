"""Algorithm 2 of the paper: its rule, its bounds, and one answer to one overload."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.brownout.control.contract import EXACT, Latency, Phase, Thresholds
from moesaic.brownout.control.latencies import LatencyWindow, percentile_90
from moesaic.brownout.control.paper import PaperControl, next_threshold
from moesaic.messages.brownout import BrownoutPolicy

POLICY = BrownoutPolicy(mode="paper")


def windows(*shares: float, version: int = 0, at_s: float = 0.0) -> dict[Phase, LatencyWindow]:
    found: dict[Phase, LatencyWindow] = {
        "prefill": LatencyWindow(5.0),
        "decode": LatencyWindow(5.0),
    }
    for share in shares:
        found["prefill"].add(Latency(at_s, share, version, share))
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
    control = PaperControl(POLICY)
    old = windows(3.0, at_s=-6.0)

    assert control.decide(0.0, Thresholds(0.3, 0.7), 4, windows()) == (0.3, 0.7)
    assert control.decide(0.0, Thresholds(0.3, 0.7), 4, old) == (0.3, 0.7)


def test_one_overload_is_answered_once_with_stamps_and_again_and_again_without() -> None:
    found = windows(3.0, 3.0)
    stamped, unstamped = (
        PaperControl(BrownoutPolicy(mode="paper", stamped=stamps)) for stamps in (True, False)
    )
    first = stamped.decide(0.0, EXACT, 0, found)

    assert first == (0.8, 1.0)
    assert stamped.decide(0.1, first, 1, found) == first
    found["prefill"].add(Latency(0.2, 3.0, 1, 3.0))
    assert stamped.decide(0.2, first, 1, found) == (pytest.approx(0.64), 1.0)

    again = EXACT
    for version in range(3):
        again = unstamped.decide(0.0, again, version, windows(3.0))
    assert again.prefill == pytest.approx(0.8**3)


def test_a_change_of_one_phase_leaves_the_samples_of_the_other_valid() -> None:
    control, found = PaperControl(POLICY), windows(3.0)
    found["decode"].add(Latency(0.0, 2.0, 0, 2.0))
    found["decode"].add(Latency(0.0, 2.0, 0, 2.0))
    changed = PaperControl(POLICY).decide(0.0, EXACT, 0, windows(3.0))
    assert changed.decode == 1.0

    control.decide(0.0, EXACT, 0, windows(3.0))

    assert control.decide(0.1, changed, 1, found).decode == pytest.approx(0.8)


@given(
    shares=st.lists(st.none() | st.floats(0, 10), max_size=60),
    least=st.floats(0, 1),
    increment=st.floats(0.001, 1),
    shrink=st.floats(0.01, 0.99),
    stamped=st.booleans(),
)
def test_thresholds_stay_within_their_bounds(
    shares: list[float | None], least: float, increment: float, shrink: float, stamped: bool
) -> None:
    policy = BrownoutPolicy(
        mode="paper",
        min_prefill_threshold=least,
        increment=increment,
        shrink=shrink,
        stamped=stamped,
    ).checked()
    control, at, version = PaperControl(policy), EXACT, 0
    for i, share in enumerate(shares):
        found = windows(*([] if share is None else [share]), version=version, at_s=float(i))
        after = control.decide(float(i), at, version, found)
        version += after != at
        at = after
        assert least <= at.prefill <= 1
        assert at.decode == 1
