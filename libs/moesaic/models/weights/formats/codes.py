"""Codes of a few bits, taken out of the words that they are packed in, and scales spread over groups."""

import torch
from torch import Tensor

from moesaic.kernels.stored_weights import CENTRE, Int4Weight, StoredWeight
from moesaic.models.configuration.weight_format import WeightFormat
from moesaic.native.library import computes_on, lib
from moesaic.native.memory import reusable


def nibbles(packed: Tensor) -> Tensor:
    """Return the codes of four bits in uint8 or int32 ``[..., n]``, uint8 ``[..., n * codes]``, low ones first."""
    octets = _octets(packed)
    if not computes_on(octets.device):
        return torch.stack((octets & 15, octets >> 4), dim=-1).flatten(-2)
    codes = reusable((*octets.shape[:-1], 2 * octets.shape[-1]), torch.uint8)
    lib().unpack_codes(packed=octets.data_ptr(), count=octets.numel(), codes=codes.data_ptr())
    return codes


def unpacked(packed: Tensor, bits: int) -> Tensor:
    """Return the codes of 4 or 8 ``bits`` in int32 ``[..., n]``, uint8 ``[..., n * 32 / bits]``, low ones first."""
    return nibbles(packed) if bits == 4 else _octets(packed)


def num_groups(num_in: int, weight_format: WeightFormat) -> int:
    """Number of groups of ``num_in`` inputs; the last may be shorter."""
    return 1 if weight_format.group is None else -(-num_in // weight_format.group)


def spread(of_groups: Tensor, num_in: int, weight_format: WeightFormat) -> Tensor:
    """Give the groups in which weights are held what the published ones have.

    Args:
        of_groups: ``[out, groups]``, as published.
        num_in: inputs of a weight.
        weight_format: format of the weight; it can be held in groups.

    Returns:
        ``[out, ceil(in / held_group)]``.
    """
    held = weight_format.held_group
    assert held is not None
    count = -(-num_in // held)
    if weight_format.group is None:
        return of_groups.expand(-1, count).contiguous()
    if weight_format.group == held:
        return of_groups
    return of_groups.repeat_interleave(weight_format.group // held, dim=1)[:, :count].contiguous()


def integer_weight(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    weight_format: WeightFormat,
    group_of: Tensor | None = None,
) -> StoredWeight:
    """Make a weight of whole numbers: ``scale * (code - zero)``.

    Args:
        codes: uint8 ``[out, in]``.
        scales: float32 ``[out, groups]``.
        zeros: the code of zero of each group, uint8 like ``scales``; None: the middle one.
        weight_format: format of the weight.
        group_of: int64 ``[in]``, the group of each input; None: they lie side by side.

    Returns:
        Codes, or float32 ``[out, in]`` if they cannot be held as such.
    """
    num_in = codes.shape[1]
    if weight_format.held is not None:
        held = weight_format.held.group
        if zeros is not None:
            zeros = spread(zeros.float(), num_in, weight_format)
        return Int4Weight(codes, spread(scales, num_in, weight_format), zeros, None, held)
    if group_of is None:
        group_of = torch.arange(num_in) // (weight_format.group or num_in)
    centre = CENTRE if weight_format.bits == 4 else 128
    middle = centre if zeros is None else zeros.float()[:, group_of]
    return (codes.float() - middle) * scales[:, group_of]


def _octets(packed: Tensor) -> Tensor:
    """Return the bytes along the last axis; of int32 the low ones first, as files and machines have them."""
    flat = (
        packed.contiguous().flatten()
    )  # a last axis of one may have any stride, which ``view`` refuses
    return flat.view(torch.uint8).view(*packed.shape[:-1], -1)
