"""Root mean square normalisation in as few operations as torch has for it on a CPU."""

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension; shape and dtype of ``x``.

    A step of one row spends a tenth of its time in ``F.rms_norm``, which is a dozen operations.
    """
    size = x.shape[-1]
    if x.dtype == torch.float32 and x.device.type == "cpu":
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        normed = x / torch.addcmul(_constant(eps), norm, norm, value=1 / size).sqrt_()
    else:
        normed = F.rms_norm(x, (size,), eps=eps)
    return normed if weight is None else normed.mul_(weight)


@lru_cache
def _constant(value: float) -> Tensor:
    return torch.tensor(value)
