"""Whole numbers as compressed-tensors packs them (``pack-quantized``).

``weight_packed`` int32 ``[out, in / codes]`` has the codes of neighbouring inputs in a word, ``weight_zero_point``
``[out / codes, groups]`` those of neighbouring outputs. ``weight_scale`` ``[out, groups]``, ``weight_shape`` ``[2]``.
"""

from moesaic.kernels.stored_weights import StoredWeight
from moesaic.models.configuration.weight_format import WeightFormat
from moesaic.models.weights.files import all_zeros
from moesaic.models.weights.formats.codes import integer_weight, num_groups, unpacked
from moesaic.models.weights.formats.groups import read_groups
from moesaic.models.weights.formats.parts import MatrixParts


def read(
    parts: MatrixParts, weight_format: WeightFormat, num_out: int, num_in: int
) -> StoredWeight:
    """Read one matrix ``[out, in]``; raises ``CheckpointError``."""
    bits, groups = weight_format.bits, num_groups(num_in, weight_format)
    stored = parts.stored("weight_shape")
    kind = "I32" if stored and stored.dtype == "I32" else "I64"
    shape = parts.codes("weight_shape", kind, 2).tolist()
    if shape != [num_out, num_in]:
        raise parts.error("weight_shape", f"expected {[num_out, num_in]}, found {shape}")
    words = parts.codes("weight_packed", "I32", num_out, -(-num_in * bits // 32))
    codes = unpacked(words, bits)[:, :num_in]
    scales, zeros = parts.numbers("weight_scale", num_out, groups), None
    if weight_format.zeros:
        words = parts.codes("weight_zero_point", "I32", -(-num_out * bits // 32), groups)
        zeros = unpacked(words.t(), bits)[:, :num_out].t()
    elif (unused := parts.stored("weight_zero_point")) and not all_zeros(unused):
        raise parts.error("weight_zero_point", "is not 0, but quantization_config says symmetric")
    group_of = read_groups(parts, "weight_g_idx", weight_format, num_in, groups)
    return integer_weight(codes, scales, zeros, weight_format, group_of)
