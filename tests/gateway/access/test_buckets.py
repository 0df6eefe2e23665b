from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.services.gateway.access import MINUTE_NS, Bucket, duration

STEPS = st.lists(
    st.tuples(
        st.integers(0, 2 * MINUTE_NS) | st.integers(0, 1000),  # nanoseconds since the step before
        st.sampled_from(["take", "settle"]),
        st.integers(-50, 50),
    ),
    max_size=30,
)


class Oracle:
    """The level as the least of what a full bucket at any earlier moment would have left: no state but the past."""

    def __init__(self, per_minute: int, now_ns: int) -> None:
        self.per_minute, self.spent = per_minute, [(now_ns, Fraction(0))]

    def level(self, now_ns: int) -> Fraction:
        level, after = Fraction(self.per_minute), Fraction(0)
        for then_ns, cost in reversed(self.spent):
            came = Fraction((now_ns - then_ns) * self.per_minute, MINUTE_NS)
            level = min(level, self.per_minute + came - after)
            after += cost
            level = min(level, self.per_minute + came - after)
        return level


@given(per_minute=st.integers(1, 100), start_ns=st.integers(0, 1 << 62), steps=STEPS)
def test_a_bucket_holds_exactly_what_its_history_leaves(per_minute, start_ns, steps) -> None:
    bucket, oracle, now_ns = Bucket(per_minute, start_ns), Oracle(per_minute, start_ns), start_ns

    for pause_ns, kind, amount in steps:
        now_ns += pause_ns
        if kind == "settle":
            bucket.settle(amount, now_ns)
            oracle.spent.append((now_ns, Fraction(-amount)))
        else:
            cost, there = abs(amount), oracle.level(now_ns)
            wait_ns = bucket.spend(cost, now_ns)
            assert (wait_ns == 0) == (there >= min(cost, per_minute))
            if wait_ns == 0:
                oracle.spent.append((now_ns, Fraction(cost)))
            else:  # not a nanosecond too long, and not one too short
                assert oracle.level(now_ns + wait_ns) >= min(cost, per_minute)
                assert oracle.level(now_ns + wait_ns - 1) < min(cost, per_minute)
        assert bucket.remaining(now_ns) == max(0, oracle.level(now_ns) // 1)
        full_ns = now_ns + bucket.full_after_ns(now_ns)
        assert oracle.level(full_ns) == per_minute


@given(per_minute=st.integers(1, 1000), costs=st.lists(st.integers(1, 200), min_size=1))
def test_over_any_time_no_more_is_spent_than_a_full_bucket_and_what_came(per_minute, costs) -> None:
    bucket, now_ns, spent = Bucket(per_minute, 0), 0, 0

    for cost in costs:
        while wait_ns := bucket.spend(cost, now_ns):
            now_ns += wait_ns
        spent += cost

    excess = max(0, max(costs) - per_minute)  # of the last one, if it is more than a minute's worth
    assert spent <= per_minute + excess + Fraction(now_ns * per_minute, MINUTE_NS)


@pytest.mark.parametrize(
    ("nanoseconds", "text"),
    [
        (0, "0ms"),
        (1, "1ms"),
        (999_000_000, "999ms"),
        (999_000_001, "1s"),
        (1_500_000_000, "2s"),
        (60_000_000_000, "1m0s"),
        (361_000_000_000, "6m1s"),
    ],
)
def test_durations_read_as_openai_writes_them(nanoseconds: int, text: str) -> None:
    assert duration(nanoseconds) == text
