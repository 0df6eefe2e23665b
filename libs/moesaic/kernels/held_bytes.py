# Bytes of weights as CPUs hold them, by arithmetic; moesaic.kernels.linear makes them so. Imports no torch.
#   float32, bfloat16, float16   2 or 4 bytes a weight.
#   int8                         1 byte, and 8 bytes an output.
#   int4                         half a byte, 2 bytes a group of inputs, and 4 bytes an output.
#   fp8                          1 byte, and 4 bytes a group of inputs.
"""The forms in which weights are held, and the memory that they take."""

from dataclasses import dataclass
from typing import Literal, get_args

Dtype = Literal["float32", "bfloat16", "float16"]
Quantization = Literal["none", "int8", "int4"]
"""Of weights at load."""

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
BLOCK = 32
"""Inputs of int4 that are computed together; a matrix has whole blocks of them. At load, they share a scale."""


@dataclass(frozen=True)
class WeightForm:
    """The form of a matrix.

    Attributes:
        kind: how weights are written.
        group: of int4 and fp8: inputs that share a scale.
        zeros: of int4: each group has a zero of its own.
        levels: of int4: codes stand for the levels of a codebook.
    """

    kind: Literal["float32", "bfloat16", "float16", "int8", "int4", "fp8"]
    group: int = 0
    zeros: bool = False
    levels: bool = False

    @classmethod
    def of(cls, dtype: Dtype, quantization: Quantization = "none") -> "WeightForm":
        """Return the form of weights of ``dtype`` that are quantised at load, or are not."""
        if quantization == "none":
            return cls(dtype)
        if quantization == "int8":
            return cls("int8")
        return cls("int4", BLOCK)


def held_bytes(shape: tuple[int, int], form: WeightForm, panel: int = 1) -> int:
    """Return the bytes of a matrix ``[out, in]`` without bias.

    Args:
        shape: out and in.
        form: format of the matrix.
        panel: outputs that lie side by side; a matrix has whole panels of them. 16 with AVX2, 64 with
            AVX-512, 1 for an estimate.
    """
    num_out, num_in = -(-shape[0] // panel) * panel, shape[1]
    if form.kind in get_args(Dtype):
        return num_out * num_in * _ITEM_BYTES[form.kind]
    if form.kind == "int8":
        return num_out * (-(-num_in // 4) * 4 + 8)
    groups = -(-num_in // form.group)
    if form.kind == "fp8":
        return num_out * (num_in + 4 * groups)
    halves = -(-num_in // BLOCK) * BLOCK // 2
    return num_out * (halves + (4 if form.zeros else 2) * groups + 4)
