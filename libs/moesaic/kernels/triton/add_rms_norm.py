# Add and norm: hidden + delta, and the RMS norm of that sum, in one pass.
#   Grid       (T,); a program holds one row in registers.
#   Layout     hidden, delta [T, H], rows may be strided; summed, normed [T, H] row-major.
#   Cost       memory-bound: 4 * H * itemsize bytes a row, against 5 for an addition and a fused norm.
#   Order      the sum is rounded first, as the addition alone would; squares are added in float32.
#   Reference  moesaic.kernels.rms_norm.
"""The residual addition and the RMS norm that follows it."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _add_rms_norm_kernel(
    hidden,
    delta,
    weight,
    summed,
    normed,
    hidden_stride,
    delta_stride,
    eps,
    HIDDEN: tl.constexpr,
    HIDDEN_POW2: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, HIDDEN_POW2)
    real = column < HIDDEN
    left = tl.load(hidden + row * hidden_stride + column, mask=real, other=0.0).to(tl.float32)
    right = tl.load(delta + row * delta_stride + column, mask=real, other=0.0).to(tl.float32)
    rounded = (left + right).to(summed.dtype.element_ty)
    tl.store(summed + row * HIDDEN + column, rounded, mask=real)
    x = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / HIDDEN + eps)
    factor = tl.load(weight + column, mask=real, other=0.0).to(tl.float32)
    out = (x * scale * factor).to(normed.dtype.element_ty)
    tl.store(normed + row * HIDDEN + column, out, mask=real)


def add_rms_norm(
    hidden: Tensor, delta: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """See ``moesaic.kernels.rms_norm``."""
    num_rows, width = hidden.shape
    assert hidden.stride(1) == delta.stride(1) == 1
    summed, normed = hidden.new_empty(num_rows, width), hidden.new_empty(num_rows, width)
    if num_rows:
        pow2 = triton.next_power_of_2(width)
        _add_rms_norm_kernel[(num_rows,)](
            hidden,
            delta,
            weight,
            summed,
            normed,
            hidden.stride(0),
            delta.stride(0),
            eps,
            HIDDEN=width,
            HIDDEN_POW2=pow2,
            num_warps=min(16, max(1, pow2 // 512)),
        )
    return summed, normed
