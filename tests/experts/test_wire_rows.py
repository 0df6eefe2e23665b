"""Packed rows come back within half a scale, and hide nothing."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as numbers
from torch import Tensor

from moesaic.errors import InvalidInput
from moesaic.experts import wire_rows
from moesaic.experts.wire_rows import (
    from_wire,
    is_sum_of,
    like_rows,
    pack_rows,
    to_wire,
    unpack_rows,
)

TINY = 127 * torch.finfo(torch.float32).tiny
FLOAT32_ROUNDS = 2**-15  # of a scale: its own last bit, the quotient's and the product's

shapes = numbers.array_shapes(min_dims=2, max_dims=2, max_side=70)
finite = st.floats(-(2.0**127), 2.0**127, width=32)


rows = numbers.arrays("float32", shapes, elements=finite).map(torch.from_numpy)


@given(rows)
def test_rows_come_back_within_half_a_scale(rows: Tensor) -> None:
    packed = pack_rows(rows)

    scales = packed[:, -4:].contiguous().numpy().view("float32")
    assert packed.shape == (len(rows), rows.shape[1] + 4)
    error = (unpack_rows(packed).double() - rows.double()).abs().amax(1)
    largest = rows.double().abs().amax(1)
    for off, scale, most in zip(
        error.tolist(), scales[:, 0].tolist(), largest.tolist(), strict=True
    ):
        assert scale == pytest.approx(most / 127, rel=1e-6) if most >= TINY else scale == 0
        assert off <= max(scale * (0.5 + FLOAT32_ROUNDS), TINY if scale == 0 else 0)


def test_halves_are_rounded_to_even() -> None:
    rows = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5]])

    assert pack_rows(rows)[0, :7].tolist() == [127, 0, 2, 2, 0, -2, -2]


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_stays_visible_and_spoils_no_other(wrong: float) -> None:
    rows = torch.ones(3, 20)
    rows[1, 7] = wrong

    back = from_wire(to_wire(rows, "int8"))

    assert back[1].isnan().all()
    assert torch.equal(back[[0, 2]], torch.ones(2, 20))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_take_the_form_of_the_rows(dtype: torch.dtype) -> None:
    rows, sums = torch.randn(3, 8).to(dtype), torch.randn(3, 8)

    own, packed = like_rows(sums, rows), like_rows(sums, to_wire(rows, "int8"))

    assert own.dtype == dtype
    assert torch.equal(own, sums.to(dtype))
    assert torch.equal(packed, pack_rows(sums))


@pytest.mark.parametrize(
    "rows", [torch.zeros(2, 8).int(), torch.zeros(2, 8, dtype=torch.int8), torch.zeros(2, 12)]
)
def test_what_are_no_rows_of_this_width_is_refused(rows: Tensor) -> None:
    wire_rows.check_rows(torch.zeros(2, 8), 8)
    wire_rows.check_rows(torch.zeros(2, 12, dtype=torch.int8), 8)

    with pytest.raises(InvalidInput, match=r"frame\.tensors"):
        wire_rows.check_rows(rows, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_a_sum_has_the_form_of_its_rows_unless_another_is_wanted(dtype: torch.dtype) -> None:
    rows = torch.zeros(3, 8 + 4 * (dtype == torch.int8), dtype=dtype)

    assert is_sum_of(rows, rows)
    assert is_sum_of(rows[:0], rows)
    assert not is_sum_of(rows[:1], rows)
    assert is_sum_of(torch.zeros(3, 8), rows) == (dtype == torch.float32)
    assert is_sum_of(torch.zeros(3, 8), rows, torch.float32)
