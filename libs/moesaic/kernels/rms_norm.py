"""Root mean square normalisation."""

import torch
from torch import Tensor
from torch.nn import functional as F

from moesaic.native.library import lib, usable


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return ``x / sqrt(mean(x^2) + eps) * weight`` over the rows of ``x`` ``[T, H]``, in its dtype."""
    if usable(x):
        normed = torch.empty(x.shape)
        _on_a_cpu(x, None, weight, eps, normed, normed)
        return normed
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute ``x + delta`` and its RMS norm.

    Args:
        x: float32 or bfloat16 ``[T, H]``.
        delta: float32 or the dtype of ``x``, ``[T, H]``.
        weight: ``[H]``.
        eps: added to the mean square.

    Returns:
        Two tensors of the dtype of ``x``, ``[T, H]``.
    """
    if x.is_cuda:
        from moesaic.kernels.triton import add_rms_norm as kernel

        return kernel.add_rms_norm(x, delta, weight, eps)
    if usable(x):
        summed, normed = torch.empty(x.shape), torch.empty(x.shape)
        _on_a_cpu(x, delta.contiguous(), weight, eps, summed, normed)
        return summed, normed
    return add_rms_norm_reference(x, delta, weight, eps)


def add_rms_norm_reference(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Compute as ``add_rms_norm``, in torch's own operations."""
    summed = (x.float() + delta.float()).to(x.dtype)
    return summed, F.rms_norm(summed.float(), weight.shape, weight.float(), eps).to(x.dtype)


def _on_a_cpu(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, summed: Tensor, normed: Tensor
) -> None:
    assert x.stride(1) == 1
    num_rows, size = x.shape
    lib().add_rms_norm(
        x=x.data_ptr(),
        x_stride=x.stride(0),
        delta=None if delta is None else delta.data_ptr(),
        weight=weight.data_ptr(),
        eps=eps,
        count=num_rows,
        size=size,
        sum=summed.data_ptr(),
        out=normed.data_ptr(),
        threads=torch.get_num_threads(),
    )
