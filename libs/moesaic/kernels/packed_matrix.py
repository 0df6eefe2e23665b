# Weights packed for the kernels for CPUs, in every form: activations and results are float32 in all of them.
#   float    32 bits, or 16 that are widened as they are read: half the bytes, and no error beside float32's.
#   int8     a scale for each output. Rows to multiply are rounded too, to 255 levels between plus and minus their
#            largest entry, so nothing depends on other rows; products and sums are exact integers. The error is at
#            most half a level of each factor: about 0.4 % of a row's largest entry, and of a weight row's.
#   int4     the same with a scale for each group of inputs, of weights and of rows: an outlier harms its group alone.
#   fp8      widened as it is read, a scale for each group.
"""Weights as the kernels for CPUs read them."""

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from moesaic.kernels.held_bytes import BLOCK, Dtype, Quantization, WeightForm
from moesaic.kernels.stored_weights import (
    CENTRE,
    Fp8Weight,
    Int4Weight,
    StoredWeight,
    dequantised,
)
from moesaic.native.library import lib
from moesaic.native.memory import huge_pages
from moesaic.native.structs import MatrixArgs

_KINDS = ("float32", "bfloat16", "float16", "int8", "int4", "fp8")  # as matrix.h numbers them
ROW_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Dtypes of weights that are numbers, as matrix.h numbers them."""
Shapes = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""Dtype and shape of each part of a packed matrix, by its name."""
_CENTRE_OF_LEVELS = 12  # of a codebook: its levels are -12 to 12, and bytes have no sign


def form_of(weight: StoredWeight, quantization: Quantization = "none") -> WeightForm:
    """Return the form in which ``weight`` is held if numbers are quantised so; codes stay as they are.

    Codes that the kernels do not take, those in groups of 20 for example, become float32.
    """
    if isinstance(weight, Tensor):
        return WeightForm.of(cast("Dtype", str(weight.dtype).removeprefix("torch.")), quantization)
    if isinstance(weight, Fp8Weight):
        return WeightForm("fp8", weight.group)
    levels = weight.levels
    fits = weight.group % BLOCK == 0 or weight.group >= weight.shape[1]
    if not fits or (levels is not None and int(levels.abs().max()) > _CENTRE_OF_LEVELS):
        return WeightForm("float32")
    return WeightForm("int4", weight.group, weight.zeros is not None, levels is not None)


class PackedMatrix:
    """A weight as the kernels for CPUs read it: ``c`` points to ``parts``."""

    def __init__(
        self, shape: Sequence[int], form: WeightForm, panels: Tensor, **others: Tensor
    ) -> None:
        """Take the parts that ``of`` has packed of a weight of this ``shape`` and ``form``."""
        self.parts = {"panels": panels, **others}
        self.shape, self.form = tuple(shape), form
        self.nbytes = sum(tensor.nbytes for tensor in self.parts.values())
        self.c = MatrixArgs(**{name: tensor.data_ptr() for name, tensor in self.parts.items()})
        self.c.num_out, self.c.num_in = shape
        self.c.form, self.c.group = _KINDS.index(form.kind), form.group
        self.c.zero = _CENTRE_OF_LEVELS if form.levels else CENTRE

    @classmethod
    def of(
        cls,
        weight: StoredWeight,
        bias: Tensor | None = None,
        form: WeightForm | None = None,
        *,
        halves: int = 1,
    ) -> "PackedMatrix":
        """Pack ``weight`` ``[out, in]``; the caller's is needed no longer.

        Args:
            weight: on a CPU.
            bias: ``[out]``.
            form: to hold it in; None: its own.
            halves: 2: each panel takes as many outputs of either half of them, and those that fill it up count.
        """
        form, (num_out, num_in) = form or form_of(weight), weight.shape
        padded = whole_panels(num_out, halves)
        told = parts_of(form, padded, num_in, biased=bias is not None)
        parts = {name: huge_pages.zeros(shape, dtype) for name, (dtype, shape) in told.items()}
        pack(weight, form, parts, bias, halves=halves)
        return cls((num_out if halves == 1 else padded, num_in), form, **parts)

    def behind(self, first: int) -> "PackedMatrix":
        """Return the outputs from the ``first`` on, which begins a panel."""
        assert first % lib().panel_width() == 0
        parts = {n: part if n == "levels" else part[first:] for n, part in self.parts.items()}
        return PackedMatrix((self.shape[0] - first, self.shape[1]), self.form, **parts)

    def look_up(self, ids: Tensor) -> Tensor:
        """Return the weights of the outputs ``ids``, int64 ``[T]``: float32 ``[T, in]``."""
        ids, out = ids.contiguous(), torch.empty(len(ids), self.shape[1])
        assert ids.dtype == torch.int64
        assert not len(ids) or 0 <= int(ids.min()) <= int(ids.max()) < self.shape[0]
        lib().look_up(
            matrix=self.c,
            ids=ids.data_ptr(),
            count=len(ids),
            out=out.data_ptr(),
            threads=torch.get_num_threads(),
        )
        return out


def pack(
    weight: StoredWeight,
    form: WeightForm,
    parts: Mapping[str, Tensor],
    bias: Tensor | None = None,
    *,
    halves: int = 1,
) -> None:
    """Fill the parts of a packed matrix of this ``form``, with a ``bias`` if it has one; see ``PackedMatrix.of``."""
    if bias is not None:
        pack_rows(bias.unsqueeze(1), parts["bias"].unsqueeze(1), halves=halves)
    if form.kind in ("int4", "fp8"):
        coded = Int4Weight.of(weight, form.group) if isinstance(weight, Tensor) else weight
        assert coded.kind == form.kind
        pack_codes(coded, parts, halves=halves)
        return
    numbers = weight if isinstance(weight, Tensor) else dequantised(weight, torch.float32)
    pack_rows(numbers, parts["panels"], parts.get("scales"), parts.get("offsets"), halves=halves)


def pack_rows(
    weight: Tensor,
    panels: Tensor,
    scales: Tensor | None = None,
    offsets: Tensor | None = None,
    *,
    halves: int = 1,
) -> None:
    """Fill ``panels`` with a weight as files have it, on the calling thread.

    As int8, each output has the scale that its largest weight over 127 is, and weights are rounded half to even. An
    output that only fills up a panel has the scale of zeros. Only what has to be rounded to 16 bits is copied before.

    Args:
        weight: ``[out, in]`` on the CPU, of any of ``ROW_DTYPES``.
        panels: of one of these ``[padded_out, in]``, or int8 ``[padded_out, padded_in]``.
        scales: of int8, float32 ``[padded_out]``.
        offsets: of int8, int32 ``[padded_out]``.
        halves: 2: each panel takes as many outputs of either half of them.
    """
    if panels.dtype in (torch.bfloat16, torch.float16):
        weight = weight.to(panels.dtype)
    num_out, num_in = weight.shape
    weight = weight.contiguous()
    stored = {
        "weight": weight.data_ptr(),
        "kind": ROW_DTYPES[weight.dtype],
        "rows": num_out // halves,
        "halves": halves,
        "num_in": num_in,
        "panels": panels.data_ptr(),
    }
    if scales is None or offsets is None:
        lib().pack_stored(**stored, form=ROW_DTYPES[panels.dtype])
    else:
        lib().pack_stored_int8(**stored, scales=scales.data_ptr(), offsets=offsets.data_ptr())


def pack_codes(
    weight: Int4Weight | Fp8Weight, parts: Mapping[str, Tensor], *, halves: int = 1
) -> None:
    """Fill the parts of a packed matrix, but for its bias, with codes; see ``pack_rows`` for ``halves``.

    Scales of int4 become float16, beside a power of two for each output. A scale of eleven bits stays what it is, as
    float16, bfloat16 and powers of two have.
    """
    codes, scales = weight.codes.contiguous(), weight.scales.contiguous()
    of_halves = {"rows": len(codes) // halves, "halves": halves}
    lib().pack_codes(
        codes=codes.data_ptr(),
        **of_halves,
        num_in=codes.shape[1],
        form=_KINDS.index(weight.kind),
        panels=parts["panels"].data_ptr(),
    )
    if isinstance(weight, Fp8Weight):
        parts["group_scales"].copy_(_by_panel(scales, halves))
        return
    lib().pack_group_scales(
        scales=scales.data_ptr(),
        **of_halves,
        groups=scales.shape[1],
        panels=parts["group_scales"].data_ptr(),
        outputs=parts["scales"].data_ptr(),
    )
    if weight.zeros is not None:
        parts["zeros"].copy_(_by_panel(weight.zeros.half(), halves))
    if weight.levels is not None:
        parts["levels"].copy_(weight.levels + _CENTRE_OF_LEVELS)


def parts_of(form: WeightForm, padded: int, num_in: int, *, biased: bool) -> Shapes:
    """Name the parts of a matrix with so many outputs in its panels, with their dtypes and shapes."""
    outputs = (padded,)
    groups = (padded, -(-num_in // form.group)) if form.group else (padded, 1)
    parts: Shapes
    if form.kind == "int8":
        parts = {
            "panels": (torch.int8, (padded, -(-num_in // 4) * 4)),
            "scales": (torch.float32, outputs),
            "offsets": (torch.int32, outputs),
        }
    elif form.kind == "fp8":
        parts = {
            "panels": (torch.uint8, (padded, num_in)),
            "group_scales": (torch.float32, groups),
        }
    elif form.kind == "int4":
        parts = {
            "panels": (torch.uint8, (padded, -(-num_in // BLOCK) * BLOCK // 2)),
            "scales": (torch.float32, outputs),
            "group_scales": (torch.float16, groups),
        }
        if form.zeros:
            parts["zeros"] = (torch.float16, groups)
        if form.levels:
            parts["levels"] = (torch.uint8, (16,))
    else:
        parts = {"panels": (getattr(torch, form.kind), (padded, num_in))}
    return parts | ({"bias": (torch.float32, outputs)} if biased else {})


def _by_panel(values: Tensor, halves: int = 1) -> Tensor:
    """Put ``[out, groups]`` into panels ``[P, groups, PANEL]``; the shape has as many rows as there are outputs."""
    (num_out, groups), width = values.shape, lib().panel_width()
    rows, each = num_out // halves, width // halves
    padded = values.new_zeros(halves, -(-rows // each) * each, groups)
    padded[:, :rows] = values.view(halves, rows, groups)
    # P, groups, halves, each.
    in_panels = padded.view(halves, -1, each, groups).permute(1, 3, 0, 2)
    return in_panels.reshape(-1, groups)


def whole_panels(size: int, halves: int = 1) -> int:
    """Round a number of outputs up to whole panels, each with as many of every one of the ``halves``."""
    width: int = lib().panel_width()
    return -(-(size // halves) // (width // halves)) * width
