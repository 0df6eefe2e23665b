"""AWQ (arXiv:2306.00978) as AutoAWQ's version ``gemm`` writes it.

``qweight`` int32 ``[in, out / 8]`` and ``qzeros`` ``[groups, out / 8]`` have eight outputs in a word: from the low end
0, 2, 4, 6, 1, 3, 5, 7. ``scales`` ``[groups, out]``.
"""

from torch import Tensor

from moesaic.kernels.stored_weights import StoredWeight
from moesaic.models.configuration.weight_format import WeightFormat
from moesaic.models.weights.formats.codes import integer_weight, nibbles, num_groups
from moesaic.models.weights.formats.parts import MatrixParts

_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # of outputs 0 to 7 in a word


def read(
    parts: MatrixParts, weight_format: WeightFormat, num_out: int, num_in: int
) -> StoredWeight:
    """Read one matrix ``[out, in]``; raises ``CheckpointError``."""
    groups, num_words = num_groups(num_in, weight_format), -(-num_out // 8)
    codes = _in_order(parts.codes("qweight", "I32", num_in, num_words), num_out)
    zeros = _in_order(parts.codes("qzeros", "I32", groups, num_words), num_out)
    scales = parts.numbers("scales", groups, num_out)
    return integer_weight(codes.t().contiguous(), scales.t(), zeros.t(), weight_format)


def _in_order(words: Tensor, num_out: int) -> Tensor:
    """Return uint8 ``[n, out]`` of int32 ``[n, out / 8]``."""
    return nibbles(words).view(len(words), -1, 8)[..., _PLACES].flatten(1)[:, :num_out]
