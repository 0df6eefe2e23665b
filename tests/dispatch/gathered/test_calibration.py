"""Times in, the size of a step that hides transfers out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.dispatch.gathered.calibration import Calibration, rows_to_hide
from moesaic.messages.performance import PartCost


@pytest.mark.parametrize(
    ("compute_s", "transfer_s", "slowdown"),
    [
        ((0.010, 0.010, 0.010), (0.004, 0.004), 1.0),  # hidden
        ((0.010, 0.010, 0.010), (0.004, 0.020), 2.0),  # by the slowest transfer
        ((0.010, 0.015, 0.010), (0.004, 0.004), 1.5),  # by the slowest layer
        ((0.010,), (), 1.0),
    ],
)
def test_a_step_grows_with_the_slowest_layers_time_over_the_first_ones(
    compute_s: tuple[float, ...], transfer_s: tuple[float, ...], slowdown: float
) -> None:
    found = Calibration(100, compute_s, transfer_s)

    assert found.slowdown == pytest.approx(slowdown)
    assert found.saturation_flops(10**9) == pytest.approx(1.2e9 * slowdown)


@given(
    fixed_s=st.floats(0, 1),
    per_row_s=st.floats(1e-6, 1),
    transfer_s=st.floats(0, 100),
)
def test_computing_that_many_rows_takes_at_least_as_long_as_the_transfer(
    fixed_s: float, per_row_s: float, transfer_s: float
) -> None:
    layer = cost(fixed_s, per_row_s)

    rows = rows_to_hide(transfer_s, layer)

    assert rows is not None
    assert layer.seconds(1, rows) >= transfer_s * (1 - 1e-6) - 1e-6


def test_if_rows_cost_nothing_none_hide_a_transfer() -> None:
    assert rows_to_hide(1.0, cost(0.5, 0.0)) is None


def cost(fixed_s: float, per_row_s: float) -> PartCost:
    return PartCost(terms=("layer", "row"), unit_s=(fixed_s, per_row_s))
