# Codes of weights as the kernels for GPUs read them: the parts of a packed matrix, in panels of one output.
#   int4   two inputs a byte, the first in its low half; whole blocks of 32 inputs. A group's scale is float16, in
#          units of a power of two for each output: what files have as float16, bfloat16 or exponents stays exact.
#   fp8    a byte an input, a float32 scale a group.
"""Weights of a few bits as the kernels for GPUs read them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from moesaic.kernels.held_bytes import BLOCK, WeightForm
from moesaic.kernels.packed_matrix import Shapes, form_of, parts_of
from moesaic.kernels.stored_weights import (
    LEVELS_OF_E2M1,
    Fp8Weight,
    Int4Weight,
    StoredWeight,
)

_GROUPS = (32, 64, 128)
PARTS = ("panels", "bias", "group_scales", "scales", "zeros")
"""In the order in which the kernels find their addresses."""


@dataclass(frozen=True)
class CodedMatrix:
    """A weight ``shape`` ``[out, in]`` in ``form``, as ``parts``; a ``bias`` is one of them."""

    shape: tuple[int, int]
    form: WeightForm
    parts: Mapping[str, Tensor]

    @classmethod
    def of(cls, weight: Int4Weight | Fp8Weight, bias: Tensor | None = None) -> "CodedMatrix":
        """Take the codes of ``weight``, whose ``coded_form`` is not None, with a ``bias`` ``[out]``."""
        form, (num_out, num_in) = coded_form(weight), weight.shape
        assert form is not None
        told = coded_parts(form, num_out, num_in, biased=bias is not None)
        device = weight.device
        parts = {n: torch.empty(s, dtype=d, device=device) for n, (d, s) in told.items()}
        fill_coded(weight, parts, bias)
        return cls((num_out, num_in), form, parts)

    @property
    def nbytes(self) -> int:
        """Bytes of the parts."""
        return sum(part.nbytes for part in self.parts.values())

    @property
    def device(self) -> torch.device:
        """Device of the parts."""
        return self.parts["panels"].device

    @property
    def is_aligned(self) -> bool:
        """True if the codes begin where the kernels can read them: at a multiple of 16 bytes."""
        return self.parts["panels"].data_ptr() % 16 == 0

    def behind(self, first: int) -> "CodedMatrix":
        """Return the outputs from the ``first`` on, with the same memory."""
        parts = {name: part[first:] for name, part in self.parts.items()}
        return CodedMatrix((self.shape[0] - first, self.shape[1]), self.form, parts)


def keeps_codes(device: torch.device) -> bool:
    """Return true if weights can be codes on ``device`` and be computed with by the kernels for GPUs."""
    return device.type == "cuda"


def coded_form(weight: StoredWeight) -> WeightForm | None:
    """Return the form in which the kernels take ``weight``; None: as numbers only."""
    if isinstance(weight, Tensor) or weight.group not in _GROUPS:
        return None
    levels = weight.levels if isinstance(weight, Int4Weight) else None
    if levels is not None and levels.tolist() != list(LEVELS_OF_E2M1):
        return None
    return form_of(weight)


def coded_parts(form: WeightForm, num_out: int, num_in: int, *, biased: bool) -> Shapes:
    """Name the parts of a matrix ``[num_out, num_in]``, with their dtypes and shapes."""
    parts = parts_of(form, num_out, num_in, biased=biased)
    # The kernels know them.
    parts.pop("levels", None)
    return parts


def fill_coded(
    weight: Int4Weight | Fp8Weight, parts: Mapping[str, Tensor], bias: Tensor | None = None
) -> None:
    """Fill the parts of a matrix, on any device, with codes, scales, and the ``bias`` if it has one."""
    if bias is not None:
        parts["bias"].copy_(bias)
    if isinstance(weight, Fp8Weight):
        parts["panels"].copy_(weight.codes)
        parts["group_scales"].copy_(weight.scales)
        return
    codes = F.pad(weight.codes, (0, -weight.shape[1] % BLOCK))
    torch.bitwise_or(codes[:, ::2], codes[:, 1::2] << 4, out=parts["panels"])
    # Below 1 in these units.
    _, exponents = torch.frexp(weight.scales.abs().amax(dim=1, keepdim=True))
    units = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)
    parts["scales"].copy_(units[:, 0])
    parts["group_scales"].copy_(weight.scales / units)
    if weight.zeros is not None:
        parts["zeros"].copy_(weight.zeros)


def addresses(parts: Sequence[Mapping[str, Tensor]]) -> list[list[int]]:
    """List the addresses of the parts of each of several matrices, in the order of ``PARTS``; 0: no such part."""
    return [[of[name].data_ptr() if name in of else 0 for name in PARTS] for of in parts]
