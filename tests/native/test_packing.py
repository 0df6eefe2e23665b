"""Packing of stored weights against the layout written out, number by number."""

from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moesaic.kernels.held_bytes import WeightForm
from moesaic.kernels.packed_matrix import ROW_DTYPES, PackedMatrix, pack_rows
from moesaic.native.library import lib, library

pytestmark = pytest.mark.skipif(library() is None, reason="needs a C compiler")

SHAPES = {
    "rows": st.integers(1, 70),
    "num_in": st.integers(1, 150),
    "halves": st.sampled_from([1, 2]),
    "dtype": st.sampled_from(list(ROW_DTYPES)),
    "seed": st.integers(0, 1 << 30),
}


def weight_of(rows: int, num_in: int, halves: int, dtype: torch.dtype, seed: int) -> Tensor:
    made = torch.randn(halves * rows, num_in, generator=torch.Generator().manual_seed(seed))
    made[:, seed % num_in] *= 100.0
    made[seed % len(made)] = 0.0
    return made.to(dtype)


def mixed(weight: Tensor, halves: int, width: int) -> Tensor:
    """The float32 outputs in the order of the panels, zeros for those that are none."""
    rows, each = len(weight) // halves, width // halves
    padded = torch.zeros(halves, -(-rows // each) * each, weight.shape[1])
    padded[:, :rows] = weight.float().view(halves, rows, -1)
    return padded.view(halves, -1, each, weight.shape[1]).transpose(0, 1).flatten(0, 2)


@given(**SHAPES)
def test_every_number_lies_where_the_kernels_read_it(
    rows: int, num_in: int, halves: int, dtype: torch.dtype, seed: int
) -> None:
    weight, width = weight_of(rows, num_in, halves, dtype, seed), lib().panel_width()
    expected = mixed(weight, halves, width)
    panels = torch.full((len(expected), num_in), 7.0)
    pack_rows(weight, panels, halves=halves)
    as_read = panels.view(-1, num_in, width).transpose(1, 2).reshape(expected.shape)
    assert torch.equal(as_read, expected)


@given(**SHAPES)
def test_numbers_of_16_bits_lie_where_the_kernels_read_them(
    rows: int, num_in: int, halves: int, dtype: torch.dtype, seed: int
) -> None:
    weight, width = weight_of(rows, num_in, halves, dtype, seed), lib().panel_width()
    lanes = lib().vector_width()
    for form in (torch.bfloat16, torch.float16):
        expected = mixed(weight.to(form), halves, width)
        panels = torch.full((len(expected), num_in), 7.0, dtype=form)
        pack_rows(weight, panels, halves=halves)
        in_order = panels.view(-1, num_in, width)
        if form == torch.bfloat16:  # a word has the numbers of two neighbouring vectors
            pairs = panels.view(-1, num_in, width // (2 * lanes), lanes, 2)
            in_order = pairs.transpose(3, 4).reshape(-1, num_in, width)
        as_read = in_order.transpose(1, 2).reshape(expected.shape)
        assert torch.equal(as_read.float(), expected)


@given(**SHAPES)
def test_bytes_are_rounded_half_to_even_by_the_largest_weight_of_their_output(
    rows: int, num_in: int, halves: int, dtype: torch.dtype, seed: int
) -> None:
    weight, width = weight_of(rows, num_in, halves, dtype, seed), lib().panel_width()
    expected, fours = mixed(weight, halves, width), -(-num_in // 4)
    scales = expected.abs().amax(dim=1).clamp_min(torch.finfo(torch.float32).tiny) / 127
    rounded = torch.zeros(len(expected), 4 * fours, dtype=torch.int8)
    rounded[:, :num_in] = (expected / scales.unsqueeze(1)).round()
    panels = torch.full((len(expected), 4 * fours), 7, dtype=torch.int8)
    found_scales, offsets = (
        torch.empty(len(expected)),
        torch.empty(len(expected), dtype=torch.int32),
    )
    pack_rows(weight, panels, found_scales, offsets, halves=halves)
    as_read = panels.view(-1, fours, width, 4).transpose(1, 2).reshape(rounded.shape)
    assert torch.equal(as_read, rounded)
    assert torch.equal(found_scales, scales)
    assert torch.equal(offsets, 128 * rounded.sum(dim=1, dtype=torch.int32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_stored_number_is_widened_exactly(dtype: torch.dtype) -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype)
    wide = torch.empty(1 << 16)
    lib().widen_stored(
        weights=every.data_ptr(), kind=ROW_DTYPES[dtype], count=len(every), to=wide.data_ptr()
    )
    finite = every.isfinite()
    assert torch.equal(wide[finite].view(torch.int32), every.float()[finite].view(torch.int32))
    assert not bool(wide[~finite].isfinite().any())
    found = lib().count_not_finite(
        weights=every.data_ptr(), kind=ROW_DTYPES[dtype], count=len(every)
    )
    assert found == int((~finite).sum())


@pytest.mark.parametrize("form", ["float32", "int8"])
def test_a_matrix_of_stored_numbers_is_that_of_the_same_float32(
    form: Literal["float32", "int8"],
) -> None:
    weight, to = weight_of(50, 70, 1, torch.bfloat16, 3), WeightForm(form)
    ours = PackedMatrix.of(weight, form=to).parts
    theirs = PackedMatrix.of(weight.float(), form=to).parts
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
