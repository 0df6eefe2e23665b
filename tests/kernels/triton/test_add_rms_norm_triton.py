"""The residual addition and norm against their reference."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="triton is not installed")

from moesaic.kernels.rms_norm import add_rms_norm_reference
from moesaic.kernels.triton.add_rms_norm import add_rms_norm


def check(num_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
    hidden = torch.randn(num_rows, width, device=device).to(dtype)
    delta = torch.randn(num_rows, width, device=device)
    weight = torch.randn(width, device=device).to(dtype)

    summed, normed = add_rms_norm(hidden, delta, weight, 1e-6)

    expected_sum, expected = add_rms_norm_reference(hidden, delta, weight, 1e-6)
    assert torch.equal(summed, expected_sum)
    assert normed.dtype == dtype
    # One rounding to the dtype, of float32 values that may differ in their last bits.
    rtol = 2e-6 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(normed, expected, atol=1e-6, rtol=rtol)


@settings(max_examples=20, deadline=None)
@given(
    num_rows=st.integers(0, 4),
    width=st.integers(1, 70),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_it_equals_the_reference(
    device: torch.device, num_rows: int, width: int, dtype: torch.dtype
) -> None:
    check(num_rows, width, dtype, device)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 64, 8192])
@pytest.mark.parametrize("width", [256, 2048, 4096, 7168])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_equals_the_reference_at_a_models_size(
    num_rows: int, width: int, dtype: torch.dtype
) -> None:
    check(num_rows, width, dtype, torch.device("cuda"))
