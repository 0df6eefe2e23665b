"""Rows are packed and unpacked as torch does it, to the bit, on every kind of processor."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as numbers
from torch import Tensor

from moesaic.experts import wire_rows

pytestmark = pytest.mark.usefixtures("native")

rows = numbers.arrays(
    "float32",
    numbers.array_shapes(min_dims=2, max_dims=2, min_side=0, max_side=70),
    elements=st.floats(width=32),
).map(torch.from_numpy)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows)
def test_c_and_torch_give_the_same_bits(rows: Tensor) -> None:
    packed = wire_rows.pack_rows(rows)

    assert torch.equal(packed, wire_rows.pack_rows_reference(rows))
    bits = wire_rows.unpack_rows(packed).view(torch.int32)
    assert torch.equal(bits, wire_rows.unpack_rows_reference(packed).view(torch.int32))


@pytest.mark.parametrize("spread", [1e-3, 1.0, 1e4])
def test_whole_rows_of_a_model_have_the_same_bits(spread: float) -> None:
    rows = torch.randn(33, 2048, generator=torch.Generator().manual_seed(3)) * spread

    packed = wire_rows.pack_rows(rows)

    assert torch.equal(packed, wire_rows.pack_rows_reference(rows))
    assert torch.equal(wire_rows.unpack_rows(packed), wire_rows.unpack_rows_reference(packed))
