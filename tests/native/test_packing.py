"""Packing of stored weights against the layout written out, number by number."""

from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moesaic.kernels import stored_weights
from moesaic.kernels.held_bytes import WeightForm
from moesaic.kernels.packed_matrix import ROW_DTYPES, PackedMatrix, pack_codes, pack_rows
from moesaic.kernels.stored_weights import Fp8Weight, Int4Weight, dequantised
from moesaic.models.weights.formats.codes import nibbles
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


CODES = {
    "rows": st.integers(1, 40),
    "num_in": st.integers(1, 150),
    "halves": st.sampled_from([1, 2]),
    "seed": st.integers(0, 1 << 30),
}


def codes_of(rows: int, num_in: int, halves: int, most: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = halves * rows, num_in
    return torch.randint(most, shape, generator=generator, dtype=torch.uint8)


@given(**CODES)
def test_halves_of_bytes_lie_where_the_kernels_read_them(
    rows: int, num_in: int, halves: int, seed: int
) -> None:
    codes, width = codes_of(rows, num_in, halves, 16, seed), lib().panel_width()
    expected = mixed(codes, halves, width).to(torch.uint8)
    blocks = -(-num_in // 32)
    panels = torch.full((len(expected), blocks * 16), 0xAB, dtype=torch.uint8)
    parts = {"panels": panels, "scales": torch.empty(len(expected))}
    parts["group_scales"] = torch.empty(len(expected), blocks, dtype=torch.float16)
    pack_codes(
        Int4Weight(codes, torch.ones(len(codes), blocks), None, None, 32), parts, halves=halves
    )

    bytes_ = panels.view(-1, blocks, 4, width, 4).permute(0, 3, 1, 2, 4).reshape(-1, blocks, 16)
    as_read = torch.cat((bytes_ & 15, bytes_ >> 4), dim=2).reshape(len(expected), -1)
    assert torch.equal(as_read[:, :num_in], expected)
    assert not bool(as_read[:, num_in:].any())


@given(**CODES)
def test_codes_of_a_byte_lie_where_the_kernels_read_them(
    rows: int, num_in: int, halves: int, seed: int
) -> None:
    codes, width = codes_of(rows, num_in, halves, 256, seed), lib().panel_width()
    expected = mixed(codes, halves, width).to(torch.uint8)
    scales = torch.rand(len(codes), 1)
    panels = torch.full((len(expected), num_in), 0xAB, dtype=torch.uint8)
    parts = {"panels": panels, "group_scales": torch.empty(len(expected), 1)}
    pack_codes(Fp8Weight(codes, scales, num_in), parts, halves=halves)

    as_read = panels.view(-1, num_in, width).transpose(1, 2).reshape(expected.shape)
    assert torch.equal(as_read, expected)
    assert torch.equal(parts["group_scales"], mixed(scales, halves, width))


@given(**CODES, size=st.sampled_from([0.0, 1e-44, 1e-38, 1e-6, 1.0, 1e30, 3e38]))
def test_scales_of_groups_are_float16_beside_a_power_of_two(
    rows: int, num_in: int, halves: int, seed: int, size: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    scales = torch.randn(halves * rows, num_in, generator=generator).clamp(-1, 1) * size
    scales[seed % len(scales)] = 0.0
    width = lib().panel_width()
    expected = mixed(scales, halves, width)
    parts = {"panels": torch.empty(len(expected), 16 * num_in, dtype=torch.uint8)}
    parts |= {
        "scales": torch.empty(len(expected)),
        "group_scales": torch.empty_like(expected).half(),
    }
    codes = torch.zeros(len(scales), 32 * num_in, dtype=torch.uint8)
    pack_codes(Int4Weight(codes, scales, None, None, 32), parts, halves=halves)

    halved = parts["group_scales"].view(-1, num_in, width).transpose(1, 2).reshape(expected.shape)
    found = halved.double() * parts["scales"].double().unsqueeze(1)
    largest = expected.abs().amax(dim=1, keepdim=True).double()
    off = (found - expected.double()).abs()
    # Half of the last of eleven bits; of small ones beside large ones, half of the least subnormal number.
    assert bool((off <= expected.abs().double() * 2.0**-11 + largest * 2.0**-37 + 1e-45).all())


@given(
    st.integers(1, 20), st.integers(1, 200), st.sampled_from([20, 32, 128]), st.integers(0, 1 << 30)
)
def test_numbers_are_rounded_to_codes_as_torch_does(
    rows: int, num_in: int, group: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, num_in, generator=generator)
    weight[seed % rows] = 0.0
    weight[:, seed % num_in] *= 30.0
    ours = Int4Weight.of(weight, group)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored_weights, "computes_on", lambda device: False)
        theirs = Int4Weight.of(weight, group)

    def errors(rounded: Int4Weight) -> Tensor:
        off = (dequantised(rounded, torch.float32) - weight).double()
        return (
            torch.nn.functional.pad(off, (0, -num_in % group)).view(rows, -1, group).square().sum(2)
        )

    assert torch.equal(ours.codes[ours.codes > 15], ours.codes[:0, 0])
    torch.testing.assert_close(errors(ours), errors(theirs), rtol=1e-5, atol=1e-12)


def test_packed_codes_come_apart_low_ones_first() -> None:
    packed = torch.arange(256, dtype=torch.uint8)
    assert nibbles(packed).tolist() == [half for b in range(256) for half in (b & 15, b >> 4)]
