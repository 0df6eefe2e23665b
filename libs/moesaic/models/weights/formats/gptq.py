"""GPTQ (arXiv:2210.17323) as AutoGPTQ and GPTQModel write it.

A word of ``qweight``, int32 ``[in / codes, out]``, has the codes of neighbouring inputs. A word of
``qzeros``, ``[groups, out / codes]``, has the codes of zero of neighbouring outputs; in the first
version each is stored less one. ``scales`` is ``[groups, out]``, ``g_idx`` ``[in]``.
"""

from torch import Tensor

from moesaic.kernels.stored_weights import StoredWeight
from moesaic.models.configuration.weight_format import WeightFormat
from moesaic.models.weights.formats.codes import integer_weight, num_groups, unpacked
from moesaic.models.weights.formats.groups import read_groups
from moesaic.models.weights.formats.parts import MatrixParts


def read(
    parts: MatrixParts, weight_format: WeightFormat, num_out: int, num_in: int
) -> StoredWeight:
    """Read one matrix ``[out, in]``; raises ``CheckpointError``."""
    bits, groups = weight_format.bits, num_groups(num_in, weight_format)
    per_word = 32 // bits
    words = parts.codes("qweight", "I32", -(-num_in // per_word), num_out)
    codes = unpacked(words.t(), bits)[:, :num_in]
    scales = parts.numbers("scales", groups, num_out).t()
    zeros = _zeros(parts, weight_format, groups, num_out)
    group_of = read_groups(parts, "g_idx", weight_format, num_in, groups)
    return integer_weight(codes, scales, zeros, weight_format, group_of)


def _zeros(
    parts: MatrixParts, weight_format: WeightFormat, groups: int, num_out: int
) -> Tensor | None:
    """Read the codes of zero, uint8 ``[out, groups]``; None: all are the middle one."""
    bits = weight_format.bits
    words = parts.codes("qzeros", "I32", groups, -(-num_out * bits // 32))
    stored = unpacked(words, bits)[:, :num_out].t()
    zeros = (stored + weight_format.zero_offset) & ((1 << bits) - 1)
    if weight_format.zeros:
        return zeros
    if not bool((zeros == 1 << (bits - 1)).all()):
        raise parts.error("qzeros", "is not symmetric, but quantization_config.sym says it is")
    return None
