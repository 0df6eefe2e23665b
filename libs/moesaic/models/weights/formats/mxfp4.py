"""MXFP4 (OCP Microscaling Formats 1.0) as gpt-oss has it: all experts of a layer in one tensor.

``NAME_blocks`` uint8 ``[experts, out, in / 32, 16]`` has two codes (e2m1) in a byte, the low one first, and
``NAME_scales`` uint8 ``[experts, out, in / 32]`` the exponents of two, plus 127.
"""

import torch

from moesaic.kernels.stored_weights import LEVELS_OF_E2M1, Int4Weight
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.models.weights.formats.codes import nibbles
from moesaic.models.weights.formats.parts import CPU

BLOCK = 32
_NO_NUMBER = 255
_SCALES = torch.tensor(
    [2.0 ** (exponent - 127) / 2 for exponent in range(_NO_NUMBER)]
)  # half: levels are double


def read_entry(
    checkpoint: Checkpoint, name: str, index: int, num: int, num_out: int, num_in: int
) -> Int4Weight:
    """Read one ``[out, in]`` of ``num`` matrices; raises ``CheckpointError``."""
    blocks, scales = f"{name}_blocks", f"{name}_scales"
    groups = -(-num_in // BLOCK)
    shape = (num, num_out, groups)
    packed = checkpoint.read_codes(blocks, (*shape, BLOCK // 2), "U8", CPU, index)
    exponents = checkpoint.read_codes(scales, shape, "U8", CPU, index)
    if bool((exponents == _NO_NUMBER).any()):
        raise checkpoint.error(scales, "some of its scales are NaN: the file is damaged")
    return Int4Weight(
        codes=nibbles(packed.flatten(1))[:, :num_in],
        scales=_SCALES[exponents.long()],
        zeros=None,
        levels=torch.tensor(LEVELS_OF_E2M1, dtype=torch.int8),
        group=BLOCK,
    )
