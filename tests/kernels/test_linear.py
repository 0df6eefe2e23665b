"""The forms of a linear layer against float64, compiled for every kind of processor that this one can play."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.kernels.gated_mlp import PlainMLP, make_mlp
from moesaic.kernels.held_bytes import Quantization
from moesaic.kernels.linear import (
    HeadLinear,
    PackedLinear,
    PlainLinear,
    make_linear,
)
from moesaic.kernels.packed_experts import PackedMLP

pytestmark = pytest.mark.usefixtures("native")
SHAPES = st.tuples(st.integers(1, 40), st.integers(1, 70), st.integers(1, 140))
QUANTIZATIONS: list[Quantization] = ["none", "int8", "int4"]


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

    out = make_linear(weight, bias if biased else None)(x)

    torch.testing.assert_close(out, exact.float(), atol=1e-4, rtol=1e-5)


@settings(deadline=None)
@given(st.integers(0, 10**6), SHAPES)
def test_int8_errs_by_less_than_half_a_level_of_each_factor(
    seed: int, shape: tuple[int, int, int]
) -> None:
    x, weight, bias = random_case(seed, *shape)
    exact = x.double() @ weight.double().t() + bias.double()

    error = (make_linear(weight, bias, "int8")(x).double() - exact).abs()

    x_step, weight_step = (t.double().abs().amax(dim=1) / 254 * 1.001 for t in (x, weight))
    bound = (
        x_step.unsqueeze(1) * weight.double().abs().sum(dim=1)
        + x.double().abs().sum(dim=1, keepdim=True) * weight_step
        + shape[1] * x_step.unsqueeze(1) * weight_step
    )
    assert (error <= bound + 1e-4).all()


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize(("num_out", "num_in"), [(64, 48), (512, 256), (512, 1536), (33, 1)])
def test_a_row_does_not_depend_on_the_rows_beside_it(
    quantization: Quantization, num_out: int, num_in: int
) -> None:
    x, weight, bias = random_case(4, 230, num_in, num_out)
    linear = make_linear(weight, bias, quantization)
    together = linear(x)

    for start, stop in [(0, 1), (3, 4), (0, 2), (5, 8), (1, 17), (0, 33), (6, 110), (100, 230)]:
        assert torch.equal(linear(x[start:stop]), together[start:stop])


def test_the_number_of_threads_changes_no_bit() -> None:
    x, weight, bias = random_case(4, 200, 100, 300)
    linear = make_linear(weight, bias)
    expected = linear(x)
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        assert torch.equal(linear(x), expected)
        assert torch.equal(linear(x[:5]), expected[:5])


def test_threads_that_compute_at_once_do_not_disturb_each_other() -> None:
    x, weight, bias = random_case(4, 40, 64, 300)
    linear = make_linear(weight, bias)
    expected = linear(x)

    def compute(number: int) -> bool:
        rows = slice(number % 7, 20 + number % 20)
        return all(torch.equal(linear(x[rows]), expected[rows]) for _ in range(50))

    with ThreadPoolExecutor(4) as executor:
        assert all(executor.map(compute, range(24)))


FORKED = """
import os, torch
from moesaic.kernels.linear import make_linear
torch.set_num_threads(2)
linear, x = make_linear(torch.randn(300, 64)), torch.randn(40, 64)
expected = linear(x)
if not (child := os.fork()):
    os._exit(0 if torch.equal(linear(x), expected) else 1)
assert os.waitpid(child, 0)[1] == 0
"""


def test_a_forked_process_has_helpers_of_its_own() -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORKED], check=True, timeout=60)


def test_int8_takes_rows_and_weights_of_zeros() -> None:
    x, weight, _ = random_case(5, 3, 8, 4)
    weight[1], x[2] = 0, 0

    out = make_linear(weight, quantization="int8")(x)

    assert not out[:, 1].any()
    assert not out[2].any()
    assert out[:2, [0, 2, 3]].all()


def test_a_number_that_is_none_stays_in_its_row() -> None:
    x, weight, _ = random_case(5, 9, 40, 70)
    linear = make_linear(weight)
    expected = linear(x)
    x[4, 7] = float("nan")

    out = linear(x)

    assert out[4].isnan().all()
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    assert torch.equal(out[others], expected[others])


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10**6), st.integers(1, 100), st.integers(1, 5), SHAPES)
def test_heads_have_weights_of_their_own_and_may_be_parts_of_wider_tensors(
    seed: int, rows: int, heads: int, shape: tuple[int, int, int]
) -> None:
    _, num_in, num_out = shape
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(heads, num_out, num_in, generator=generator)
    wide = torch.randn(rows, heads, num_in + 3, generator=generator)
    out = torch.full((rows, heads, num_out + 5), 7.0)

    HeadLinear(weight)(wide[..., 3:], out[..., :num_out])

    expected = torch.einsum("thi,hoi->tho", wide[..., 3:].double(), weight.double()).float()
    torch.testing.assert_close(out[..., :num_out], expected, atol=1e-4, rtol=1e-5)
    assert (out[..., num_out:] == 7).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_mlp_computes_in_float32_whatever_its_weights_are(dtype: torch.dtype) -> None:
    x, gate_up, _ = random_case(6, 5, 8, 12)
    mlp = make_mlp(gate_up.to(dtype), torch.ones(8, 6, dtype=dtype))

    assert mlp(x).dtype == torch.float32
    assert mlp(x[:0]).shape == (0, 8)


def test_a_weight_takes_the_fastest_form_its_device_has() -> None:
    weight = torch.ones(4, 4)

    assert isinstance(make_linear(weight), PackedLinear)
    assert isinstance(make_mlp(torch.ones(4, 4), torch.ones(4, 2)), PackedMLP)
    assert isinstance(make_linear(weight.to("meta")), PlainLinear)
    assert isinstance(make_linear(weight.bfloat16()), PackedLinear)
    assert isinstance(make_mlp(weight.to("meta"), weight.to("meta")), PlainMLP)


@pytest.mark.parametrize("make", [make_linear, lambda w, **q: make_mlp(w, w, **q)])
def test_int8_is_refused_where_it_cannot_be_computed(
    make: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.ones(4, 4)
    with pytest.raises(ValueError, match="int8 is only computed on a CPU"):
        make(weight.to("meta"), quantization="int8")
    monkeypatch.setattr("moesaic.native.library.library", lambda: None)
    with pytest.raises(ValueError, match="install gcc"):
        make(weight, quantization="int8")


@settings(deadline=None)
@given(st.integers(0, 10**6), SHAPES, st.booleans(), st.sampled_from(QUANTIZATIONS), st.data())
def test_the_last_outputs_alone_have_the_bits_that_they_have_among_all(
    seed: int,
    shape: tuple[int, int, int],
    biased: bool,
    quantization: Quantization,
    data: st.DataObject,
) -> None:
    x, weight, bias = random_case(seed, *shape)
    whole = make_linear(weight, bias if biased else None, quantization)
    first = data.draw(st.integers(0, len(weight) - 1) | st.sampled_from([0, 64, 128]))
    if first >= len(weight):
        return

    part = whole.behind(first)

    assert torch.equal(part(x), whole(x)[:, first:])
    assert part(x).is_contiguous()
