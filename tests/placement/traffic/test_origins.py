"""Demand by origin, in rows per second."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from moesaic.errors import InvalidInput
from moesaic.placement.traffic.origins import OriginTraffic
from tests.placement.traffic.origin_windows import window

TOKENS = np.array([[10, 20, 0, 0], [0, 0, 30, 0]])


def demand_of(half_life_s: float = 60.0) -> OriginTraffic:
    return OriginTraffic(4, [1, 3], half_life_s)


def of(origin: str, tokens: np.ndarray = TOKENS, window_s: float = 10.0):  # type: ignore[no-untyped-def, type-arg]
    return window(origin, tokens, int(tokens.max()), [1, 3], window_s)


@settings(max_examples=50, deadline=None)
@given(
    late_s=st.lists(st.floats(0, 4), min_size=2, max_size=60),
    half_life_s=st.floats(60, 600),
    scale=st.integers(1, 50),
)
def test_a_steady_origin_has_its_rate_however_its_windows_are_delayed(
    late_s: list[float], half_life_s: float, scale: int
) -> None:
    demand = demand_of(half_life_s)
    for i, late in enumerate(late_s):
        demand.add(of("a", TOKENS * scale), 10.0 * i + late)

    rates = demand.demand(["a"], 10.0 * len(late_s) - 10 + late_s[-1] + 9.9)[0]

    np.testing.assert_allclose(rates, TOKENS * scale / 10, rtol=0.25)


def test_origins_are_apart_and_in_the_order_asked_for() -> None:
    demand = demand_of()
    demand.add(of("a"), 0.0)
    demand.add(of("b", TOKENS * 3), 0.0)

    rates = demand.demand(["b", "never seen", "a"], 0.0)

    np.testing.assert_allclose(rates, np.stack([TOKENS * 0.3, TOKENS * 0, TOKENS * 0.1]))
    assert demand.seen(["b", "never seen", "a"]).tolist() == [True, False, True]
    assert demand.origins == {"a", "b"}
    demand.forget("b")
    assert not demand.demand(["b"], 0.0).any()
    assert demand.demand([], 0.0).shape == (0, 2, 4)


def test_demand_fades_in_silence_but_not_before_a_window_is_due() -> None:
    demand = demand_of(60.0)
    for i in range(100):
        demand.add(of("a"), 10.0 * i)

    rates = [demand.demand(["a"], 990.0 + after)[0].max() for after in (0, 10, 70, 130, 10_000)]

    np.testing.assert_allclose(rates[:2], 3.0)
    np.testing.assert_allclose(rates[2:4], [1.5, 0.75], rtol=0.15)
    assert rates[4] < 1e-9


def test_silence_between_windows_counts_as_time() -> None:
    busy, quiet = demand_of(600.0), demand_of(600.0)
    for i in range(400):
        busy.add(of("a"), 10.0 * i)
        if i % 5 == 0:
            quiet.add(of("a"), 10.0 * i)

    seldom, often = (d.demand(["a"], 3_970.0).sum() for d in (quiet, busy))

    assert seldom == pytest.approx(often / 5, rel=0.05)


def test_windows_that_come_all_at_once_make_no_higher_rate() -> None:
    demand = demand_of()
    for _ in range(30):  # what a new leader reads
        demand.add(of("a"), 0.0)

    np.testing.assert_allclose(demand.demand(["a"], 5.0)[0], TOKENS / 10)
    assert (
        demand.demand(["a"], 200.0).sum() < 0.75 * TOKENS.sum() / 10
    )  # their lengths hide nothing


def test_newer_rows_count_more() -> None:
    demand = demand_of(60.0)
    for i in range(60):
        demand.add(of("a", TOKENS if i < 30 else TOKENS[:, ::-1]), 10.0 * i)

    rates = demand.demand(["a"], 590.0)[0]

    assert rates[0, 2] / rates[0, 1] > 2 ** (300 / 60) * 0.8


def test_a_clock_that_goes_back_does_no_harm() -> None:
    demand = demand_of()
    demand.add(of("a"), 100.0)
    demand.add(of("a"), 50.0)

    rates = demand.demand(["a"], 0.0)

    np.testing.assert_allclose(rates[0], TOKENS / 10)


def test_a_window_without_length_or_layers_is_no_demand() -> None:
    demand = demand_of()
    demand.add(of("a", window_s=0.0), 0.0)
    assert not demand.demand(["a"], 0.0).any()
    demand.add(replace(of("b"), layers=[]), 0.0)
    assert not demand.demand(["b"], 0.0).any()


@pytest.mark.parametrize(
    "wrong",
    [
        replace(of("a"), num_experts=5),
        replace(of("a"), window_s=float("nan")),
        window("a", TOKENS, 30, [1, 2]),
        window("a", TOKENS, 29, [1, 3]),
    ],
)
def test_what_cannot_be_true_is_refused_and_changes_nothing(wrong) -> None:  # type: ignore[no-untyped-def]
    demand = demand_of()
    demand.add(of("a"), 0.0)

    with pytest.raises(InvalidInput):
        demand.add(wrong, 1.0)

    np.testing.assert_allclose(demand.demand(["a"], 0.0)[0], TOKENS / 10)
    with pytest.raises(InvalidInput):
        demand_of(0.0)
