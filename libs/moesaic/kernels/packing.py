"""Packs weights as files have them for the kernels for CPUs, on the calling thread and through no copy of them."""

import torch
from torch import Tensor

from moesaic.native.library import lib

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Dtypes of stored weights, as C numbers them."""


def pack_rows(
    weight: Tensor,
    panels: Tensor,
    scales: Tensor | None = None,
    offsets: Tensor | None = None,
    *,
    halves: int = 1,
) -> None:
    """Fill ``panels`` with a weight, and if they are int8 ``scales`` and ``offsets`` too.

    As int8, each output has the scale that its largest weight over 127 is, and weights are rounded half to even. An
    output that only fills up a panel has the scale of zeros.

    Args:
        weight: ``[out, in]`` on the CPU, of any of ``KINDS``.
        panels: float32 ``[padded_out, in]``, or int8 ``[padded_out, padded_in]``.
        scales: float32 ``[padded_out]``.
        offsets: int32 ``[padded_out]``.
        halves: 2: each panel takes as many outputs of either half of them.
    """
    num_out, num_in = weight.shape
    weight = weight.contiguous()
    stored = {
        "weight": weight.data_ptr(),
        "kind": KINDS[weight.dtype],
        "rows": num_out // halves,
        "halves": halves,
        "num_in": num_in,
        "panels": panels.data_ptr(),
    }
    if scales is None or offsets is None:
        lib().pack_stored(**stored)
    else:
        lib().pack_stored_int8(**stored, scales=scales.data_ptr(), offsets=offsets.data_ptr())
