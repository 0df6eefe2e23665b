"""Bytes of tensors, as ranks tell them each other."""

import torch
from torch import Tensor


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the content of a tensor, row-major, as uint8 ``[nbytes]`` on its device.

    It shares the tensor's memory where the content lies in one piece.
    """
    flat = tensor.detach().reshape(-1)
    # torch calls a tensor of one element contiguous whatever its stride, and then cannot view it.
    if flat.stride(0) != 1:
        flat = torch.empty(flat.shape, dtype=flat.dtype, device=flat.device).copy_(flat)
    return flat.view(torch.uint8)


def from_bytes(content: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Read what ``as_bytes`` gave; it shares the memory of ``content``."""
    return content.view(dtype).view(shape)
