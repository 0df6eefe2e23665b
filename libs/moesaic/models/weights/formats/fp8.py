"""Eight-bit floating point (e4m3) with a scale for each block, each output or all: ``weight``, ``weight_scale_inv``.

The scales multiply, in spite of their name (DeepSeek-V3, arXiv:2412.19437, section 3.3). They are floating-point
numbers, or powers of two in bytes that have the exponent (ue8m0). If the configuration names no blocks, the shape of
the scales tells which weights share one.
"""

from dataclasses import replace

import torch
from torch import Tensor

from moesaic.kernels.stored_weights import Fp8Weight, StoredWeight
from moesaic.models.configuration.weight_format import WeightFormat
from moesaic.models.weights.formats.codes import num_groups, spread
from moesaic.models.weights.formats.names import SCALES_OF_FP8
from moesaic.models.weights.formats.parts import MatrixParts

USUAL_BLOCK = 128  # the default of transformers
_NO_NUMBER = 0x7F  # with either sign; the format has no infinities


def read(
    parts: MatrixParts, weight_format: WeightFormat, num_out: int, num_in: int, halves: int = 1
) -> StoredWeight:
    """Read one matrix ``[out, in]``, of ``halves`` that have scales of their own; raises ``CheckpointError``."""
    codes = parts.codes("weight", "F8_E4M3", num_out, num_in)
    if bool(((codes & _NO_NUMBER) == _NO_NUMBER).any()):
        raise parts.error("weight", "some of its weights are NaN: the file is damaged")
    scales, found = _scales(parts, weight_format, num_out, num_in, halves)
    held = weight_format.held_group
    if held is not None:
        return Fp8Weight(codes, spread(scales, num_in, found), held)
    assert found.group is not None
    by_input = scales.repeat_interleave(found.group, dim=1)[:, :num_in]
    return codes.view(torch.float8_e4m3fn).float() * by_input


def _scales(
    parts: MatrixParts, weight_format: WeightFormat, num_out: int, num_in: int, halves: int
) -> tuple[Tensor, WeightFormat]:
    """Read scales, float32 ``[out, groups]``, and the format with their group size."""
    name = next((each for each in SCALES_OF_FP8 if parts.shape(each) is not None), None)
    name, shape = name or weight_format.scale, parts.shape(name or weight_format.scale) or ()
    tall, wide = (*shape, 1, 1)[:2]
    blocks = [(weight_format.rows or num_out, weight_format.group)]
    if weight_format.rows is None:
        blocks += [(1, None), (USUAL_BLOCK, USUAL_BLOCK)]
    for rows, group in blocks:
        of_this = replace(weight_format, rows=rows, group=group)
        scale_of = _scale_of(parts, name, num_out, rows, halves, tall)
        if len(shape) < 3 and wide == num_groups(num_in, of_this) and scale_of is not None:
            return parts.scales(name, *shape).view(tall, wide)[scale_of], of_this
    rows, group = blocks[0]
    expected = -(-num_out // rows), 1 if group is None else -(-num_in // group)
    # Refused
    return parts.scales(name, *expected), weight_format


def _scale_of(
    parts: MatrixParts, name: str, num_out: int, rows: int, halves: int, tall: int
) -> Tensor | None:
    """Find the row of scales for each output, int64 ``[out]``; None: ``tall`` is not the right number of rows."""
    half, outputs = num_out // halves, torch.arange(num_out)
    of_half = -(-half // rows)
    whole, by_half = tall == -(-num_out // rows), tall == halves * of_half
    if whole and by_half and half % rows and halves > 1:
        raise parts.error(name, f"{half} outputs of gate and of up do not fill blocks of {rows}")
    if by_half:
        return outputs // half * of_half + outputs % half // rows
    return outputs // rows if whole else None
