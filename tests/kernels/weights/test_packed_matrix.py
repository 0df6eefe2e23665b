"""Every form of a packed weight against float64: of the values that it stands for, and of rows rounded as it says."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moesaic.kernels.expert_layout import ExpertLayout
from moesaic.kernels.gated_mlp import make_mlp
from moesaic.kernels.held_bytes import Quantization, WeightForm, held_bytes
from moesaic.kernels.linear import PackedLinear, make_linear
from moesaic.kernels.packed_experts import PackedMLP
from moesaic.kernels.packed_matrix import PackedMatrix, form_of
from moesaic.kernels.stored_weights import Int4Weight, StoredWeight, dequantised
from moesaic.native.library import lib
from tests.kernels.weights.test_stored_weights import made

pytestmark = pytest.mark.usefixtures("native")
KINDS = ("float32", "bfloat16", "float16", "int8", "int4", "zeros", "levels", "fp8")
SHAPES = st.tuples(st.integers(1, 150), st.integers(1, 300), st.sampled_from([32, 96, 128]))


def weight_of(kind: str, seed: int, num_out: int, num_in: int, group: int) -> StoredWeight:
    if kind in ("bfloat16", "float16"):
        numbers = made("float32", seed, num_out, num_in, group)
        return dequantised(numbers, getattr(torch, kind))
    return made("float32" if kind == "int8" else kind, seed, num_out, num_in, group)


def layer_of(weight: StoredWeight, bias: Tensor | None, kind: str) -> PackedLinear:
    made = make_linear(weight, bias, "int8" if kind == "int8" else "none")
    assert isinstance(made, PackedLinear)
    return made


def rounded(x: Tensor, group: int) -> Tensor:
    """The rows as they are multiplied, float64."""
    out, rows = np.zeros(x.shape), x.numpy()
    for begin in range(0, x.shape[1], group):
        part = rows[:, begin : begin + group]
        scale = np.abs(part).max(1, keepdims=True) / np.float32(127)
        scale = np.maximum(scale, np.float32(1e-30) / np.float32(127))
        levels = np.rint(part * (np.float32(1) / scale))
        out[:, begin : begin + group] = levels.astype(float) * scale.astype(float)
    return torch.from_numpy(out)


def exact(layer: PackedLinear, weight: StoredWeight, x: Tensor) -> tuple[Tensor, Tensor]:
    """The product in float64, and the sum of the magnitudes of what is added up."""
    form, values = layer.matrix.form, dequantised(weight, torch.float32).double()
    if form.kind == "int8":
        scales = (values.abs().amax(1, keepdim=True).float() / 127).clamp_min(1e-38)
        values = (values.float() / scales).round().double() * scales.double()
    rows = x.double()
    if form.kind in ("int8", "int4"):
        rows = rounded(x, form.group or x.shape[1])
    return rows @ values.t(), rows.abs() @ values.abs().t()


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10**6), SHAPES, st.integers(1, 100), st.booleans(), st.sampled_from([1, 2]))
def test_each_form_multiplies_its_own_values(
    kind: str, seed: int, shape: tuple[int, int, int], count: int, biased: bool, threads: int
) -> None:
    weight = weight_of(kind, seed, *shape)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, shape[1], generator=generator)
    x[:, seed % shape[1]] *= 50  # an outlier
    bias = torch.randn(shape[0], generator=generator) if biased else None
    layer = layer_of(weight, bias, kind)
    torch.set_num_threads(threads)

    out = layer(x)

    expected, size = exact(layer, weight, x)
    # Sums in float32, scales of int4 kept with eleven bits.
    allowed = size * (5e-4 if layer.matrix.form.kind == "int4" else 2e-6) + 1e-5
    assert ((out.double() - (0 if bias is None else bias) - expected).abs() <= allowed).all()


@pytest.mark.parametrize("kind", ["int4", "zeros", "levels"])
def test_published_scales_stay_what_they_are(kind: str) -> None:
    weight = made(kind, 7, 40, 256, 32)
    assert isinstance(weight, Int4Weight)
    published = weight.scales.half().float() * 2.0 ** torch.randint(-40, 40, (40, 1))
    weight = Int4Weight(weight.codes, published, weight.zeros, weight.levels, 32)

    held = PackedMatrix.of(weight).look_up(torch.arange(40))

    assert torch.equal(held, dequantised(weight, torch.float32))


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=15)
@given(st.integers(0, 10**6), SHAPES)
def test_rows_are_looked_up(kind: str, seed: int, shape: tuple[int, int, int]) -> None:
    weight = weight_of(kind, seed, *shape)
    ids = torch.randint(0, shape[0], (9,), generator=torch.Generator().manual_seed(seed))

    found = layer_of(weight, None, kind).matrix.look_up(ids)

    values = dequantised(weight, torch.float32)
    level = values.abs().amax(1, keepdim=True) / 127
    allowed = level * (0.501 if kind == "int8" else 0) + values.abs() * 5e-4
    exactly = kind in ("float32", "bfloat16", "float16", "fp8")
    error = (found - values[ids]).abs()
    assert (error <= (1e-7 * values.abs() if exactly else allowed)[ids]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_depends_on_nothing_beside_it(kind: str) -> None:
    weight = weight_of(kind, 3, 150, 200, 32)
    x = torch.randn(110, 200, generator=torch.Generator().manual_seed(3))
    layer = layer_of(weight, None, kind)
    together = layer(x)
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        for rows in (slice(0, 1), slice(3, 8), slice(0, 33), slice(6, 110)):
            assert torch.equal(layer(x[rows]), together[rows])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "int8"])
def test_a_number_that_is_none_and_an_outlier_stay_in_their_place(kind: str) -> None:
    weight = weight_of(kind, 5, 40, 128, 32)
    x = torch.randn(4, 128, generator=torch.Generator().manual_seed(5))
    layer = layer_of(weight, None, kind)
    expected = layer(x)
    x[1, 5], x[3] = 1e6, 0

    out = layer(x)

    assert torch.equal(out[[0, 2]], expected[[0, 2]])
    assert not out[3].any()
    other = x[1].clone()
    other[5] = 0
    rest = out[1] - 1e6 * dequantised(weight, torch.float32)[:, 5]
    # Inputs of other groups are as exact as without the outlier; float32's last bits remain.
    values = dequantised(weight, torch.float32)
    own = values[:, :32].abs() @ x[1, :32].abs().clamp_max(100)
    allowed = own + 1e6 * values[:, 5].abs() * 1e-3 + 3
    assert ((rest - values @ other).abs() <= allowed).all()


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10**6), st.sampled_from(KINDS), st.integers(1, 120), st.integers(1, 80))
def test_experts_are_packed_in_every_form(seed: int, kind: str, hidden: int, size: int) -> None:
    gate_up = weight_of(kind, seed, 2 * size, hidden, 32)
    down = weight_of(kind, seed + 1, hidden, size, 32)
    x = torch.randn(50, hidden, generator=torch.Generator().manual_seed(seed))
    quantization: Quantization = "int8" if kind == "int8" else "none"
    first, second = make_linear(gate_up, None, quantization), make_linear(down, None, quantization)

    mlp = make_mlp(gate_up, down, quantization)

    assert isinstance(mlp, PackedMLP)
    gate, up = first(x).double().chunk(2, dim=-1)
    inner = (gate * gate.sigmoid() * up).float()
    expected, got = second(inner), mlp(x)
    # A rounded entry may fall to the next level where silu's last bit differs.
    assert (got - expected).norm() <= 2e-3 * expected.norm() + 1e-5
    assert torch.equal(mlp(x[7:9]), got[7:9])
    codes = None if isinstance(gate_up, Tensor) else form_of(gate_up)
    if codes is None or codes == form_of(down):
        dtype = gate_up.dtype if isinstance(gate_up, Tensor) else torch.float32
        layout = ExpertLayout(hidden, size, dtype, quantization, codes=codes)
        memory = torch.empty(layout.nbytes, dtype=torch.uint8)
        layout.pack(gate_up, down, memory)
        assert torch.equal(layout.view(memory)(x), got)


def test_layouts_refuse_codes_that_they_were_not_told_of() -> None:
    layout = ExpertLayout(64, 32, torch.float32, codes=WeightForm("int4", 32))
    memory = torch.empty(layout.nbytes, dtype=torch.uint8)
    for kind in ("float32", "zeros", "fp8"):
        with pytest.raises(ValueError, match="the layout's"):
            layout.pack(weight_of(kind, 1, 64, 64, 32), weight_of(kind, 2, 64, 32, 32), memory)
    forms = [
        WeightForm("int4", 32),
        WeightForm("int4", 32, zeros=True),
        WeightForm("int4", 32, levels=True),
    ]
    forms += [WeightForm("int4", 64), WeightForm("fp8", 32)]
    assert len({ExpertLayout(64, 64, torch.float32, codes=form).name for form in forms}) == 5


def test_codes_that_the_kernels_do_not_take_become_numbers() -> None:
    odd, levels = made("int4", 1, 5, 60, 20), made("levels", 1, 5, 64, 32)
    assert isinstance(levels, Int4Weight)
    assert levels.levels is not None
    wide = Int4Weight(levels.codes, levels.scales, None, levels.levels * 10, 32)
    for weight in (odd, wide):
        layer = make_linear(weight)
        assert isinstance(layer, PackedLinear)
        assert layer.matrix.form == WeightForm("float32")
        values = layer.matrix.look_up(torch.arange(5))
        assert torch.equal(values, dequantised(weight, torch.float32))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(64, 128), (33, 70), (1, 1)])
def test_bytes_are_counted_before(kind: str, shape: tuple[int, int]) -> None:
    matrix = layer_of(weight_of(kind, 1, *shape, 32), None, kind).matrix
    levels = 16 if kind == "levels" else 0
    assert held_bytes(shape, matrix.form, lib().panel_width()) == matrix.nbytes - levels
