"""Root mean square normalisation."""

import torch
from torch import Tensor
from torch.nn import functional as F

from moesaic.kernels.native.library import lib, usable


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the rows of ``x`` ``[T, H]``; its dtype."""
    if usable(x):
        normed = torch.empty(x.shape)
        _on_a_cpu(x, None, weight, eps, normed, normed)
        return normed
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``x + delta`` and its RMS norm.

    Args:
        x: float32 or bfloat16 ``[T, H]``.
        delta: float32 or the dtype of ``x``, ``[T, H]``.
        weight: ``[H]``.
        eps: added to the mean square.

    Returns:
        Two tensors of the dtype of ``x``, ``[T, H]``.
    """
    if x.is_cuda:
        from moesaic.kernels import add_rms_norm_triton as kernel

        return kernel.add_rms_norm(x, delta, weight, eps)
    if usable(x):
        summed, normed = torch.empty(x.shape), torch.empty(x.shape)
        _on_a_cpu(x, delta.contiguous(), weight, eps, summed, normed)
        return summed, normed
    return add_rms_norm_reference(x, delta, weight, eps)


def add_rms_norm_reference(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """As ``add_rms_norm``, in torch's own operations."""
    summed = (x.float() + delta.float()).to(x.dtype)
    return summed, F.rms_norm(summed.float(), weight.shape, weight.float(), eps).to(x.dtype)


def _on_a_cpu(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, summed: Tensor, normed: Tensor
) -> None:
    assert x.stride(1) == 1
    lib().add_rms_norm(
        x.data_ptr(),
        x.stride(0),
        None if delta is None else delta.data_ptr(),
        weight.data_ptr(),
        eps,
        *x.shape,
        summed.data_ptr(),
        normed.data_ptr(),
        torch.get_num_threads(),
    )
