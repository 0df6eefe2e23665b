# Weights packed for the kernels for CPUs, in every form: activations and results are float32 in all of them.
#   float    32 bits, or 16 that are widened as they are read: half the bytes, and no error beside float32's.
#   int8     rows are rounded too; products and sums are exact integers.
#   int4     the same with a scale for each group of inputs, of weights and of rows.
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
_CENTRE_OF_LEVELS = 12  # of a codebook: its levels are -12 to 12, and bytes have no sign


def form_of(weight: StoredWeight, quantization: Quantization = "none") -> WeightForm:
    """Return the form in which ``weight`` is held if numbers are quantised so; codes stay as they are.

    Codes that the kernels do not take, those in groups of 20 for example, become float32.
    """
    if isinstance(weight, Tensor):
        return WeightForm.of(cast(Dtype, str(weight.dtype).removeprefix("torch.")), quantization)
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
        self, shape: Sequence[int], form: WeightForm, panels: Tensor, **others: Tensor | None
    ) -> None:
        """Take the parts that ``of`` has packed of a weight of this ``shape`` and ``form``."""
        parts = {"panels": panels, **others}
        self.parts = {name: tensor for name, tensor in parts.items() if tensor is not None}
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
        lasting: bool = True,
    ) -> "PackedMatrix":
        """Pack ``weight`` ``[out, in]``; the caller's is needed no longer.

        Args:
            weight: on a CPU.
            bias: ``[out]``.
            form: to hold it in; None: its own.
            lasting: False keeps it out of the memory for weights.
        """
        form = form or form_of(weight)
        if form.kind == "int8":
            numbers = weight if isinstance(weight, Tensor) else dequantised(weight, torch.float32)
            return cls._int8(numbers, bias, lasting)
        if form.kind == "int4":
            if isinstance(weight, Tensor):
                weight = Int4Weight.of(weight, form.group)
            assert isinstance(weight, Int4Weight)
            return cls._int4(weight, form, bias, lasting)
        if form.kind == "fp8":
            assert isinstance(weight, Fp8Weight)
            parts = _room_for_codes(weight, form, lasting)
            pack_fp8(weight, parts)
            return cls(weight.shape, form, **parts, bias=_padded(bias))
        dtype: torch.dtype = getattr(torch, form.kind)
        numbers = weight if isinstance(weight, Tensor) else dequantised(weight, dtype)
        panels = _zeros((whole_panels(len(numbers)), numbers.shape[1]), dtype, lasting)
        pack_rows(numbers, panels)
        return cls(weight.shape, form, panels, bias=_padded(bias))

    @classmethod
    def _int8(cls, weight: Tensor, bias: Tensor | None, lasting: bool) -> "PackedMatrix":
        """Round ``weight`` to signed bytes with a scale for each output, and pack them.

        Rows to multiply are rounded too, to 255 levels between plus and minus their largest entry,
        so nothing depends on other rows; products and sums are exact integers. The error is at most
        half a level of each factor: about 0.4 % of a row's largest entry, and of a weight row's.
        """
        padded_out, padded_in = whole_panels(len(weight)), -(-weight.shape[1] // 4) * 4
        panels = _zeros((padded_out, padded_in), torch.int8, lasting)
        scales, offsets = torch.empty(padded_out), torch.empty(padded_out, dtype=torch.int32)
        pack_rows(weight, panels, scales, offsets)
        return cls(
            weight.shape,
            WeightForm("int8"),
            panels,
            scales=scales,
            offsets=offsets,
            bias=_padded(bias),
        )

    @classmethod
    def _int4(
        cls, weight: Int4Weight, form: WeightForm, bias: Tensor | None, lasting: bool
    ) -> "PackedMatrix":
        """Pack codes, with a float16 scale for each group, and a power of two for each output.

        Rows to multiply are rounded to 255 levels in each group, so an outlier harms its group alone.
        A scale of eleven bits, as float16, bfloat16 and powers of two have, stays what it is.
        """
        parts = _room_for_codes(weight, form, lasting)
        pack_int4(weight, parts)
        return cls(weight.shape, form, **parts, bias=_padded(bias))

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


def pack_int4(weight: Int4Weight, parts: Mapping[str, Tensor], *, halves: int = 1) -> None:
    """Fill the parts of a packed matrix, but for its bias, with codes; see ``pack_rows`` for ``halves``."""
    _pack_codes(weight.codes, "int4", parts["panels"], halves)
    scales = weight.scales.contiguous()
    lib().pack_group_scales(
        scales=scales.data_ptr(),
        rows=len(scales) // halves,
        halves=halves,
        groups=scales.shape[1],
        panels=parts["group_scales"].data_ptr(),
        outputs=parts["scales"].data_ptr(),
    )
    if weight.zeros is not None:
        parts["zeros"].copy_(_by_panel(weight.zeros.half(), halves))
    if weight.levels is not None:
        parts["levels"].copy_(weight.levels + _CENTRE_OF_LEVELS)


def pack_fp8(weight: Fp8Weight, parts: Mapping[str, Tensor], *, halves: int = 1) -> None:
    """Fill the parts of a packed matrix, but for its bias, with codes; see ``pack_rows`` for ``halves``."""
    _pack_codes(weight.codes, "fp8", parts["panels"], halves)
    parts["group_scales"].copy_(_by_panel(weight.scales, halves))


def _room_for_codes(
    weight: Int4Weight | Fp8Weight, form: WeightForm, lasting: bool
) -> dict[str, Tensor]:
    """Make the parts that packing fills, but for a bias."""
    num_out, num_in = weight.shape
    padded, groups = whole_panels(num_out), weight.scales.shape[1]
    if isinstance(weight, Fp8Weight):
        panels = _zeros((padded, num_in), torch.uint8, lasting)
        return {"panels": panels, "group_scales": torch.empty(padded, groups)}
    width = -(-num_in // BLOCK) * BLOCK // 2
    parts = {
        "panels": _zeros((padded, width), torch.uint8, lasting),
        "scales": torch.empty(padded),
        "group_scales": torch.empty(padded, groups, dtype=torch.float16),
    }
    if form.zeros:
        parts["zeros"] = torch.empty(padded, groups, dtype=torch.float16)
    if form.levels:
        parts["levels"] = torch.empty(16, dtype=torch.uint8)
    return parts


def _pack_codes(codes: Tensor, kind: str, panels: Tensor, halves: int) -> None:
    codes = codes.contiguous()
    lib().pack_codes(
        codes=codes.data_ptr(),
        rows=len(codes) // halves,
        halves=halves,
        num_in=codes.shape[1],
        form=_KINDS.index(kind),
        panels=panels.data_ptr(),
    )


def _zeros(shape: tuple[int, int], dtype: torch.dtype, lasting: bool) -> Tensor:
    return huge_pages.zeros(shape, dtype) if lasting else torch.zeros(shape, dtype=dtype)


def _by_panel(values: Tensor, halves: int = 1) -> Tensor:
    """Put ``[out, groups]`` into panels ``[P, groups, PANEL]``; the shape has as many rows as there are outputs."""
    (num_out, groups), width = values.shape, lib().panel_width()
    rows, each = num_out // halves, width // halves
    padded = values.new_zeros(halves, -(-rows // each) * each, groups)
    padded[:, :rows] = values.view(halves, rows, groups)
    in_panels = padded.view(halves, -1, each, groups).permute(1, 3, 0, 2)  # P, groups, halves, each
    return in_panels.reshape(-1, groups)


def whole_panels(size: int) -> int:
    """Round a number of outputs up to whole panels."""
    width: int = lib().panel_width()
    return -(-size // width) * width


def _padded(vector: Tensor | None) -> Tensor | None:
    if vector is None:
        return None
    padded = torch.zeros(whole_panels(len(vector)))
    padded[: len(vector)] = vector
    return padded
