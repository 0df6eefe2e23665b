"""Weights in the forms of checkpoints: the values that they stand for, parts of them, and rounding."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.kernels.stored_weights import (
    Fp8Weight,
    Int4Weight,
    StoredWeight,
    cat_rows,
    dequantised,
    take_rows,
)

SHAPES = st.tuples(st.integers(1, 9), st.integers(1, 80), st.sampled_from([4, 32, 128]))
KINDS = ("float32", "int4", "zeros", "levels", "fp8")


def made(kind: str, seed: int, num_out: int, num_in: int, group: int) -> StoredWeight:
    generator = torch.Generator().manual_seed(seed)
    scales = torch.rand(num_out, -(-num_in // group), generator=generator) + 0.1
    codes = torch.randint(0, 16, (num_out, num_in), dtype=torch.uint8, generator=generator)
    zeros = torch.randint(0, 16, scales.shape, generator=generator).float()
    levels = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12])
    if kind == "float32":
        return torch.randn(num_out, num_in, generator=generator)
    if kind == "fp8":
        numbers = torch.randn(num_out, num_in, generator=generator).to(torch.float8_e4m3fn)
        return Fp8Weight(numbers.view(torch.uint8), scales, group)
    return Int4Weight(
        codes,
        scales,
        zeros if kind == "zeros" else None,
        levels.to(torch.int8) if kind == "levels" else None,
        group,
    )


def value_of(weight: StoredWeight, row: int, column: int) -> float:
    if isinstance(weight, torch.Tensor):
        return float(weight[row, column])
    code, group = int(weight.codes[row, column]), column // weight.group
    scale = float(weight.scales[row, group])
    if isinstance(weight, Fp8Weight):
        sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
        size = mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        return (-size if sign else size) * scale
    if weight.levels is not None:
        return int(weight.levels[code]) * scale
    return (code - (8 if weight.zeros is None else float(weight.zeros[row, group]))) * scale


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10**6), SHAPES, st.data())
def test_each_form_has_the_values_that_it_stands_for(
    kind: str, seed: int, shape: tuple[int, int, int], data: st.DataObject
) -> None:
    weight = made(kind, seed, *shape)
    row, column = (data.draw(st.integers(0, size - 1)) for size in shape[:2])

    values = dequantised(weight, torch.float32)

    assert tuple(values.shape) == tuple(weight.shape) == shape[:2]
    assert float(values[row, column]) == pytest.approx(value_of(weight, row, column), rel=1e-6)
    assert dequantised(weight, torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_taken_and_put_below_each_other(kind: str) -> None:
    one, other = (made(kind, seed, 6, 70, 32) for seed in (1, 2))
    order = torch.tensor([4, 0, 4])

    both = cat_rows([take_rows(one, order), take_rows(other, slice(2, 5))])

    expected = [dequantised(one, torch.float32)[order], dequantised(other, torch.float32)[2:5]]
    assert len(both) == 6
    assert torch.equal(dequantised(both, torch.float32), torch.cat(expected))


def test_zeros_of_some_are_zeros_of_all() -> None:
    weights = [made(kind, 3, 2, 64, 32) for kind in ("int4", "zeros")]

    values = dequantised(cat_rows(weights), torch.float32)

    assert torch.equal(values, torch.cat([dequantised(w, torch.float32) for w in weights]))


@pytest.mark.parametrize(
    "pair", [("float32", "int4"), ("int4", "fp8"), ("int4", "levels"), ("fp8", "float32")]
)
def test_weights_of_different_forms_are_never_one(pair: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match="different forms"):
        cat_rows([made(kind, 4, 2, 64, 32) for kind in pair])
    with pytest.raises(ValueError, match="different forms"):
        cat_rows([made("int4", 4, 2, 64, 32), made("int4", 4, 2, 64, 4)])


@pytest.mark.parametrize("what", ["scales", "zeros", "levels"])
def test_parts_that_do_not_fit_are_refused(what: str) -> None:
    parts = {
        "codes": torch.zeros(2, 64, dtype=torch.uint8),
        "scales": torch.ones(2, 3 if what == "scales" else 2),
        "zeros": torch.ones(2, 1) if what == "zeros" else None,
        "levels": torch.zeros(15, dtype=torch.int8) if what == "levels" else None,
    }
    with pytest.raises(ValueError, match=what):
        Int4Weight(**parts, group=32)  # type: ignore[arg-type]


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), SHAPES)
def test_rounding_errs_by_few_steps_and_less_than_the_plain_scale(
    seed: int, shape: tuple[int, int, int]
) -> None:
    num_out, num_in, group = shape
    weight = made("float32", seed, num_out, num_in, group)
    assert isinstance(weight, torch.Tensor)

    rounded = Int4Weight.of(weight, group)

    error = dequantised(rounded, torch.float32) - weight
    steps = rounded.scales.abs().repeat_interleave(group, dim=1)[:, :num_in]
    assert (error.abs() <= 1.7501 * steps).all()
    for first in range(0, num_in, group):
        part = weight[:, first : first + group]
        extreme = part.gather(1, part.abs().argmax(dim=1, keepdim=True))
        scale = extreme / -8
        plain = (part / scale).round().clamp(-8, 7) * scale - part
        ours = error[:, first : first + group]
        assert (ours.square().sum(1) <= plain.square().sum(1) * 1.0001 + 1e-12).all()


def test_zeros_are_rounded_to_zeros() -> None:
    rounded = Int4Weight.of(torch.zeros(3, 40), 32)

    assert (dequantised(rounded, torch.float32) == 0).all()
    assert rounded.scales.isfinite().all()
