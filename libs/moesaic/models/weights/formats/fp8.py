"""Eight-bit floating point, e4m3, with a scale for each block, each output or all: ``weight`` and ``weight_scale_inv``.

The scales multiply, whatever their name says (DeepSeek-V3, arXiv:2412.19437, section 3.3).
"""

import torch
from torch import Tensor

from moesaic.kernels.stored_weights import Fp8Weight, StoredWeight
from moesaic.models.configuration.weight_format import WeightFormat
from moesaic.models.weights.formats.codes import num_groups, spread
from moesaic.models.weights.formats.parts import MatrixParts

_NO_NUMBER = 0x7F  # with either sign; the format has no infinities


def read(
    parts: MatrixParts, weight_format: WeightFormat, num_out: int, num_in: int
) -> StoredWeight:
    """Read one matrix ``[out, in]``; raises ``CheckpointError``."""
    codes = parts.codes("weight", "F8_E4M3", num_out, num_in)
    if bool(((codes & _NO_NUMBER) == _NO_NUMBER).any()):
        raise parts.error("weight", "some of its weights are no number: the file is damaged")
    scales = _scales(parts, weight_format, num_out, num_in)
    held = weight_format.held_group
    if held is not None:
        return Fp8Weight(codes, spread(scales, num_in, weight_format), held)
    assert weight_format.group is not None
    by_input = scales.repeat_interleave(weight_format.group, dim=1)[:, :num_in]
    return codes.view(torch.float8_e4m3fn).float() * by_input


def _scales(parts: MatrixParts, weight_format: WeightFormat, num_out: int, num_in: int) -> Tensor:
    """Read float32 ``[out, groups]``."""
    name, rows = weight_format.scale, weight_format.rows
    if rows is None:  # one for all: a number, or a list of one
        stored = parts.stored(name)
        shape = () if stored and stored.shape == () else (1,)
        return parts.numbers(name, *shape).expand(num_out, 1)
    of_blocks = parts.numbers(name, -(-num_out // rows), num_groups(num_in, weight_format))
    return of_blocks.repeat_interleave(rows, dim=0)[:num_out]
