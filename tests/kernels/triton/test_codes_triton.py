"""The kernels' products of codes against those of the numbers that the codes stand for."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from moesaic.experts.slots import LayerSlots, compute_on_gpu
from moesaic.kernels.coded_matrix import CodedMatrix, coded_form
from moesaic.kernels.expert_layout import ExpertLayout
from moesaic.kernels.gated_mlp import CodedMLP, PlainMLP
from moesaic.kernels.linear import CodedLinear
from moesaic.kernels.stored_weights import (
    LEVELS_OF_E2M1,
    Fp8Weight,
    Int4Weight,
    dequantised,
    to_device,
)
from moesaic.kernels.triton.grouped_experts import grouped_experts
from moesaic.kernels.triton.grouped_products import SlotWeights
from moesaic.models.configuration.architecture import ClampedSwiglu
from tests.kernels.triton.test_grouped_experts_triton import relative_error

KINDS = ("fp8", "int4", "zeros", "levels")
BF16 = torch.bfloat16
Codes = Int4Weight | Fp8Weight


def made(kind: str, num_out: int, num_in: int, group: int, generator: torch.Generator) -> Codes:
    """Random codes whose products with normal rows are about 1; scales of 11 bits, as files have."""
    shape = num_out, -(-num_in // group)
    scales = (torch.rand(shape, generator=generator) + 0.1).half().float() * num_in**-0.5
    # Far apart, so that the outputs need units of their own.
    scales *= 2.0 ** torch.randint(-3, 3, (num_out, 1), generator=generator)
    if kind == "fp8":
        numbers = torch.randn(num_out, num_in, generator=generator).to(torch.float8_e4m3fn)
        return Fp8Weight(numbers.view(torch.uint8), scales, group)
    scales = (scales / 8).half().float()
    codes = torch.randint(0, 16, (num_out, num_in), dtype=torch.uint8, generator=generator)
    zeros = torch.randint(0, 16, shape, generator=generator).float()
    levels = torch.tensor(LEVELS_OF_E2M1, dtype=torch.int8)
    return Int4Weight(
        codes,
        scales,
        zeros if kind == "zeros" else None,
        levels if kind == "levels" else None,
        group,
    )


def of(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=4, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    num_rows=st.integers(0, 20),
    num_out=st.sampled_from([1, 24, 40]),
    num_in=st.sampled_from([16, 40, 136]),
    group=st.sampled_from([32, 64, 128]),
    biased=st.booleans(),
)
@example(0, 2, 20, 192, 32, True)  # whole tiles of 64 inputs, as the 2,880 of gpt-oss are
@example(0, 2, 20, 256, 32, False)  # four groups a tile
@example(0, 130, 40, 96, 64, True)  # blocks of 128 rows
def test_a_linear_layer_has_the_bits_of_its_numbers(
    device: torch.device,
    kind: str,
    seed: int,
    num_rows: int,
    num_out: int,
    num_in: int,
    group: int,
    biased: bool,
) -> None:
    weight = made(kind, num_out, num_in, group, of(seed))
    x = torch.randn(num_rows, num_in, generator=of(seed + 1)).to(BF16)
    bias = torch.randn(num_out, generator=of(seed + 2)) if biased else None
    here = to_device(weight, device)
    assert not isinstance(here, Tensor)

    found = CodedLinear(CodedMatrix.of(here, None if bias is None else bias.to(device)))(
        x.to(device)
    )

    # The weights are rounded to bfloat16 as ``dequantised`` rounds them; sums are float32.
    exact = x.double() @ dequantised(weight, BF16).double().t()
    expected = (exact if bias is None else exact + bias).float()
    assert found.dtype == BF16
    torch.testing.assert_close(found.float().cpu(), expected, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_float32_rows_are_multiplied_in_float32(device: torch.device, kind: str) -> None:
    weight = made(kind, 40, 136, 32, of(1))
    x = torch.randn(5, 136, generator=of(2))
    here = to_device(weight, device)
    assert not isinstance(here, Tensor)

    found = CodedLinear(CodedMatrix.of(here))(x.to(device))

    expected = x.double() @ dequantised(weight, torch.float32).double().t()
    torch.testing.assert_close(found.cpu(), expected.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_in", "first"), [(64, 24), (40, 3)])
def test_the_last_outputs_alone_have_the_bits_that_they_have_among_all(
    device: torch.device, kind: str, num_in: int, first: int
) -> None:
    here = to_device(made(kind, 40, num_in, 32, of(1)), device)
    assert not isinstance(here, Tensor)
    x = torch.randn(5, num_in, generator=of(2)).to(device, BF16)
    whole = CodedLinear(CodedMatrix.of(here, torch.randn(40, generator=of(3)).to(device)))

    part = whole.behind(first)

    assert torch.equal(part(x), whole(x)[:, first:])
    assert isinstance(part, CodedLinear) == (num_in == 64 or kind != "fp8")


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=2, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    num_rows=st.sampled_from([1, 3]),
    hidden=st.sampled_from([16, 40, 136]),
    size=st.sampled_from([16, 24]),
    group=st.sampled_from([32, 64, 128]),
    clamped=st.booleans(),
)
@example(0, 2, 192, 40, 32, True)
def test_experts_have_the_bits_of_their_numbers(
    device: torch.device,
    kind: str,
    seed: int,
    num_rows: int,
    hidden: int,
    size: int,
    group: int,
    clamped: bool,
) -> None:
    experts_have_the_bits_of_their_numbers(
        device, kind, seed, num_rows, hidden, size, group, clamped
    )


def experts_have_the_bits_of_their_numbers(
    device: torch.device,
    kind: str,
    seed: int,
    num_rows: int,
    hidden: int,
    size: int,
    group: int,
    clamped: bool,
) -> None:
    num_slots, generator = 3, of(seed)
    swiglu = ClampedSwiglu(1.702, 0.75) if clamped else None
    first = made(kind, 2 * size, hidden, group, generator)
    layout = ExpertLayout(
        hidden,
        size,
        BF16,
        as_stored=True,
        biased=clamped,
        activation=swiglu,
        codes=coded_form(first),
    )
    coded, plain = [], []
    for _ in range(num_slots):
        gate_up = made(kind, 2 * size, hidden, group, generator)
        down = made(kind, hidden, size, group, generator)
        biases = tuple(torch.randn(n, generator=generator).to(BF16) for n in (2 * size, hidden))
        packed = torch.zeros(layout.nbytes, dtype=torch.uint8)
        layout.pack(gate_up, down, packed, (biases[0], biases[1]) if clamped else None)
        coded.append(layout.view(packed.to(device)))
        numbers = (dequantised(weight, BF16).to(device) for weight in (gate_up, down))
        here = (biases[0].to(device), biases[1].to(device)) if clamped else None
        plain.append(PlainMLP(*numbers, here, swiglu))
    rows = torch.randn(num_rows, hidden, generator=generator).to(device, BF16)
    weights = torch.rand(num_rows, 2, generator=generator).to(device)
    slots = torch.rand(num_rows, num_slots + 1, generator=generator).argsort(dim=1)[:, :2] - 1

    found = compute_on_gpu(rows, weights, slots.to(device), LayerSlots((0, 1, 2), tuple(coded)))

    expected = grouped_experts(rows, weights, slots.to(device), SlotWeights.of(plain))
    # Tiles of many rows are narrower with codes, and an interpreted product is of another size then.
    assert relative_error(found, expected) < (2e-3 if num_rows * 2 > 64 * num_slots else 1e-6)
    assert isinstance(coded[0], CodedMLP)


def test_experts_of_many_rows_have_the_bits_of_their_numbers(device: torch.device) -> None:
    """Sorted, in blocks of 128 rows; each form in them would cost twenty seconds and find what tiles of few rows do."""
    experts_have_the_bits_of_their_numbers(device, "levels", 0, 140, 72, 40, 32, True)


@pytest.mark.parametrize("kind", KINDS)
def test_an_mlp_of_codes_computes_what_its_numbers_do(device: torch.device, kind: str) -> None:
    gate_up, down = made(kind, 48, 40, 32, of(1)), made(kind, 40, 24, 32, of(2))
    x = torch.randn(5, 40, generator=of(3)).to(device, BF16)
    both = [to_device(weight, device) for weight in (gate_up, down)]

    found = CodedMLP(*(CodedMatrix.of(w) for w in both if not isinstance(w, Tensor)))(x)

    expected = PlainMLP(*(dequantised(weight, BF16).to(device) for weight in both))(x)
    assert relative_error(found.float(), expected.float()) < 6e-3


def test_codes_that_the_kernels_do_not_take_are_numbers() -> None:
    weight = made("levels", 4, 40, 32, of(1))
    assert isinstance(weight, Int4Weight)
    levels = torch.arange(16, dtype=torch.int8) - 8

    assert coded_form(weight) is not None
    assert coded_form(Int4Weight(weight.codes, weight.scales, None, levels, 32)) is None
    assert coded_form(made("int4", 4, 40, 20, of(1))) is None
    assert coded_form(torch.ones(2, 2)) is None
