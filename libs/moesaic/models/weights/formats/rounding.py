"""Numbers rounded to the form of a model's codes: united experts take the places of published ones."""

import torch
from torch import Tensor
from torch.nn import functional as F

from moesaic.kernels.held_bytes import WeightForm
from moesaic.kernels.stored_weights import (
    CENTRE,
    LEVELS_OF_E2M1,
    Fp8Weight,
    Int4Weight,
    StoredWeight,
)

_LARGEST_FP8 = 448.0


def rounded(weight: StoredWeight, form: WeightForm | None) -> StoredWeight:
    """Round ``weight`` ``[out, in]`` to ``form``, int4 or fp8; None and codes stay as they are."""
    if form is None or not isinstance(weight, Tensor):
        return weight
    weight = weight.float()
    if form.kind == "int4" and not form.levels:
        whole = Int4Weight.of(weight, form.group)
        zeros = torch.full_like(whole.scales, CENTRE) if form.zeros else None
        return Int4Weight(whole.codes, whole.scales, zeros, None, form.group)
    num_in = weight.shape[1]
    padded = F.pad(weight, (0, -num_in % form.group))
    groups = padded.view(len(weight), -1, form.group)
    largest = groups.abs().amax(dim=2, keepdim=True)
    if form.kind == "fp8":
        scales = (largest / _LARGEST_FP8).clamp_min(torch.finfo(torch.float32).tiny)
        codes = (groups / scales).to(torch.float8_e4m3fn).view(torch.uint8)
        return Fp8Weight(codes.flatten(1)[:, :num_in].contiguous(), scales[..., 0], form.group)
    levels = torch.tensor(LEVELS_OF_E2M1[:8])
    scales = (largest / levels[-1]).clamp_min(torch.finfo(torch.float32).tiny)
    nearest = torch.bucketize((groups / scales).abs(), (levels[1:] + levels[:-1]) / 2)
    codes = (nearest + 8 * (groups < 0)).to(torch.uint8).flatten(1)[:, :num_in].contiguous()
    table = torch.tensor(LEVELS_OF_E2M1, dtype=torch.int8)
    return Int4Weight(codes, scales[..., 0], None, table, form.group)
