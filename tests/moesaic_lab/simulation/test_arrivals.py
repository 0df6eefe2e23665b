import numpy as np
import pytest

from moesaic.errors import InvalidInput
from moesaic_lab.simulation.arrivals import ArrivalTrace, RateCurve

LENGTHS = ArrivalTrace.of(np.array([0.0, 1.0]), np.array([10, 200]), np.array([5, 50]))


def test_arrivals_have_the_rates_of_their_curve() -> None:
    curve = RateCurve(np.array([2.0, 0.0, 20.0]), 1000.0)

    trace = curve.arrivals(LENGTHS, seed=1)

    counts, _ = np.histogram(trace.at_s, [0.0, 1000.0, 2000.0, 3000.0])
    assert counts[0] == pytest.approx(2000, rel=0.1)
    assert counts[1] == 0
    assert counts[2] == pytest.approx(20000, rel=0.05)
    assert trace.span_s == 3000.0


@pytest.mark.parametrize("gap_cv", [0.5, 1.0, 3.0])
def test_gaps_vary_as_much_as_asked_for(gap_cv: float) -> None:
    trace = RateCurve.constant(10.0, 10_000.0).arrivals(LENGTHS, seed=2, gap_cv=gap_cv)

    gaps = np.diff(trace.at_s)
    assert gaps.mean() == pytest.approx(0.1, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(gap_cv, rel=0.1)


def test_the_same_seed_draws_the_same_arrivals() -> None:
    curve = RateCurve.constant(5.0, 100.0)

    first, again, other = (curve.arrivals(LENGTHS, seed) for seed in (3, 3, 4))

    assert np.array_equal(first.at_s, again.at_s)
    assert np.array_equal(first.prompt_tokens, again.prompt_tokens)
    assert len(other) != len(first) or not np.array_equal(first.at_s, other.at_s)


def test_tokens_of_one_request_are_drawn_together() -> None:
    trace = RateCurve.constant(5.0, 100.0).arrivals(LENGTHS, seed=5)

    pairs = set(zip(trace.prompt_tokens.tolist(), trace.answer_tokens.tolist(), strict=True))
    assert pairs == {(10, 5), (200, 50)}


def test_a_scaled_trace_has_the_rate_asked_for_and_the_same_proportions() -> None:
    trace = RateCurve.constant(5.0, 100.0).arrivals(LENGTHS, seed=5)

    scaled = trace.at_rate(20.0)

    assert scaled.requests_per_s == pytest.approx(20.0)
    assert scaled.at_s * (trace.span_s / scaled.span_s) == pytest.approx(trace.at_s)


def test_shortened_prompts_have_a_token_left_to_compute() -> None:
    trace = ArrivalTrace.of(np.zeros(1), np.array([900]), np.array([70]), np.array([512]))

    short = trace.at_most(prompt_tokens=100, answer_tokens=10)

    assert (short.prompt_tokens[0], short.answer_tokens[0], short.cached_tokens[0]) == (100, 10, 99)


def test_times_that_do_not_ascend_are_refused() -> None:
    with pytest.raises(InvalidInput, match="at_s"):
        ArrivalTrace.of(np.array([1.0, 0.5]), np.full(2, 9), np.full(2, 2))
