"""The forms of a linear layer against float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.kernels.gated_mlp import GatedMLP
from moesaic.kernels.linear import Int8Linear, PackedLinear, PlainLinear, make_linear

SHAPES = st.tuples(st.integers(1, 40), st.integers(1, 70), st.integers(1, 70))


def random_case(
    seed: int, rows: int, num_in: int, num_out: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(rows, num_in, generator=generator),
        torch.randn(num_out, num_in, generator=generator),
        torch.randn(num_out, generator=generator),
    )


@settings(deadline=None)
@given(st.integers(0, 10**6), SHAPES, st.booleans())
def test_packing_changes_nothing_but_rounding(
    seed: int, shape: tuple[int, int, int], biased: bool
) -> None:
    x, weight, bias = random_case(seed, *shape)
    exact = x.double() @ weight.double().t() + (bias.double() if biased else 0)

    out = PackedLinear(weight, bias if biased else None)(x)

    torch.testing.assert_close(out, exact.float(), atol=1e-4, rtol=1e-5)


@settings(deadline=None)
@given(st.integers(0, 10**6), SHAPES)
def test_int8_errs_by_less_than_half_a_level_of_each_factor(
    seed: int, shape: tuple[int, int, int]
) -> None:
    x, weight, bias = random_case(seed, *shape)
    exact = x.double() @ weight.double().t() + bias.double()

    error = (Int8Linear(weight, bias)(x).double() - exact).abs()

    x_step, weight_step = (t.double().abs().amax(dim=1) / 254 * 1.001 for t in (x, weight))
    bound = (
        x_step.unsqueeze(1) * weight.double().abs().sum(dim=1)
        + x.double().abs().sum(dim=1, keepdim=True) * weight_step
        + shape[1] * x_step.unsqueeze(1) * weight_step
    )
    assert (error <= bound + 1e-4).all()


@pytest.mark.parametrize("form", [PackedLinear, Int8Linear])
@pytest.mark.parametrize(("num_out", "num_in"), [(64, 48), (512, 256), (512, 1536), (33, 1)])
def test_a_row_does_not_depend_on_the_rows_beside_it(
    form: type[PackedLinear] | type[Int8Linear], num_out: int, num_in: int
) -> None:
    x, weight, bias = random_case(4, 70, num_in, num_out)
    linear = form(weight, bias)
    together = linear(x)

    for start, stop in [(0, 1), (3, 4), (0, 2), (5, 8), (1, 17), (0, 33), (6, 70)]:
        assert torch.equal(linear(x[start:stop]), together[start:stop])


def test_int8_takes_rows_and_weights_of_zeros() -> None:
    x, weight, _ = random_case(5, 3, 8, 4)
    weight[1], x[2] = 0, 0

    out = Int8Linear(weight)(x)

    assert not out[:, 1].any()
    assert not out[2].any()
    assert out[:2, [0, 2, 3]].all()


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_mlp_keeps_the_dtype_of_its_rows(quantization: str, dtype: torch.dtype) -> None:
    x, gate_up, _ = (t.to(dtype) for t in random_case(6, 5, 8, 12))
    mlp = GatedMLP.of(gate_up, torch.ones(8, 6, dtype=dtype), quantization)  # type: ignore[arg-type]

    assert mlp(x).dtype == dtype
    assert mlp(x[:0]).shape == (0, 8)


def test_a_weight_takes_the_fastest_form_its_device_has() -> None:
    weight = torch.ones(4, 4)

    assert isinstance(make_linear(weight), PackedLinear)
    assert isinstance(make_linear(weight, quantization="int8"), Int8Linear)
    assert isinstance(make_linear(weight.to("meta")), PlainLinear)
    with pytest.raises(ValueError, match="int8 is only computed on a CPU"):
        make_linear(weight.to("meta"), quantization="int8")
