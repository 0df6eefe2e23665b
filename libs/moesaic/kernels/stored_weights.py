# Weights as checkpoints hold them: numbers, or codes of a few bits with a scale for each group of inputs.
#   int4   value = scale * (code - zero), or scale * levels[code] (MXFP4's codebook, doubled).
#   fp8    value = e4m3(code) * scale.
#   Group  of inputs that lie side by side; the last may be shorter.
"""Weights of a linear layer in the forms in which checkpoints hold them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from moesaic.native.library import computes_on, lib
from moesaic.native.memory import reusable

CENTRE = 8
"""The code that stands for zero where a weight has no zeros of its own."""
# Codes 0 to 7 are 0, 0.5, 1, 1.5, 2, 3, 4 and 6; the upper bit is the sign. Doubled, they are whole.
LEVELS_OF_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""The levels of MXFP4."""
# The signed extreme of a group lies at -8, or a little beyond: what is cut off there, all others gain in step.
_STEPS_TO_EXTREME = (-8.0, -8.75, -7.5, 8.0, 7.5)
_ROUNDED_AT_A_TIME = 1 << 22  # weights


class _Codes:
    """Codes with a scale for each group of inputs."""

    codes: Tensor
    scales: Tensor
    group: int

    @property
    def shape(self) -> torch.Size:
        """``[out, in]``."""
        return self.codes.shape

    @property
    def device(self) -> torch.device:
        """Device of the codes."""
        return self.codes.device

    def __len__(self) -> int:
        return len(self.codes)


@dataclass(frozen=True)
class Int4Weight(_Codes):
    """Codes of four bits.

    Attributes:
        codes: uint8 ``[out, in]``, 0 to 15.
        scales: float32 ``[out, ceil(in / group)]``.
        zeros: the code of zero, float32 like ``scales``; None: 8 everywhere.
        levels: int8 ``[16]``, the values of codes in scales, from -12 to 12; None: codes count from ``zeros``.
        group: inputs that share a scale.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    levels: Tensor | None
    group: int
    kind: ClassVar[Literal["int4"]] = "int4"

    def __post_init__(self) -> None:
        """Raise ``ValueError`` if the parts do not fit each other."""
        _check_codes(self.codes, self.scales, self.group)
        if self.zeros is not None and self.zeros.shape != self.scales.shape:
            raise ValueError(f"zeros {list(self.zeros.shape)} and scales {list(self.scales.shape)}")
        if self.levels is not None and (self.levels.shape != (16,) or self.zeros is not None):
            raise ValueError("levels must be 16 numbers, without zero points")

    @classmethod
    def of(cls, weight: Tensor, group: int) -> "Int4Weight":
        """Round ``weight`` ``[out, in]`` to 16 levels around zero in each group of inputs.

        Of a few scales, each group has the one with the least squared error; 8 steps to its signed
        extreme is one of them. A weight errs by half a step, at the ends of the levels by up to 1.75.
        """
        num_out, num_in = weight.shape
        num_groups = -(-num_in // group)
        codes = torch.empty(num_out, num_in, dtype=torch.uint8, device=weight.device)
        scales = torch.empty(num_out, num_groups, device=weight.device)
        each = max(1, _ROUNDED_AT_A_TIME // num_in)
        for first in range(0, num_out, each):
            rows = weight[first : first + each].float()
            if computes_on(weight.device):
                parts = codes[first : first + each], scales[first : first + each]
                _round_natively(rows.contiguous(), group, *parts)
                continue
            padded = rows.new_zeros(len(rows), num_groups * group)
            padded[:, :num_in] = rows
            rounded, of_group = _round(padded.view(-1, group))
            codes[first : first + each] = rounded.view(len(rows), -1)[:, :num_in]
            scales[first : first + each] = of_group.view(len(rows), -1)
        return cls(codes, scales, None, None, group)


@dataclass(frozen=True)
class Fp8Weight(_Codes):
    """Codes of eight bits, a sign, four of exponent, three of mantissa, without infinities.

    Attributes:
        codes: uint8 ``[out, in]``, the bits of ``torch.float8_e4m3fn``.
        scales: float32 ``[out, ceil(in / group)]``.
        group: inputs that share a scale.
    """

    codes: Tensor
    scales: Tensor
    group: int
    kind: ClassVar[Literal["fp8"]] = "fp8"

    def __post_init__(self) -> None:
        """Raise ``ValueError`` if the parts do not fit each other."""
        _check_codes(self.codes, self.scales, self.group)


StoredWeight: TypeAlias = Tensor | Int4Weight | Fp8Weight


def dequantised(weight: StoredWeight, dtype: torch.dtype) -> Tensor:
    """Return the values of ``weight`` as ``dtype`` ``[out, in]``; they are computed in float32."""
    if isinstance(weight, Tensor):
        return weight.to(dtype)
    if isinstance(weight, Fp8Weight):
        values = weight.codes.view(torch.float8_e4m3fn).float()
    elif weight.levels is not None:
        values = weight.levels.float()[weight.codes.long()]
    elif weight.zeros is not None:
        values = weight.codes.float() - _spread(weight.zeros, weight.shape[1], weight.group)
    else:
        values = weight.codes.float() - CENTRE
    return (values * _spread(weight.scales, weight.shape[1], weight.group)).to(dtype)


def to_device(weight: StoredWeight, device: torch.device) -> StoredWeight:
    """Return ``weight`` on ``device``, codes as codes."""
    if isinstance(weight, Tensor):
        return weight.to(device)
    parts: dict[str, Any] = {name: part.to(device) for name, part in _by_group(weight).items()}
    if isinstance(weight, Int4Weight) and weight.levels is not None:
        parts["levels"] = weight.levels.to(device)
    return replace(weight, codes=weight.codes.to(device), **parts)


def take_rows(weight: StoredWeight, index: slice | Tensor) -> StoredWeight:
    """Return the outputs of ``weight`` that ``index`` names."""
    if isinstance(weight, Tensor):
        return weight[index]
    parts = {name: part[index] for name, part in _by_group(weight).items()}
    return replace(weight, codes=weight.codes[index], **parts)


def take_columns(weight: StoredWeight, first: int, end: int, dtype: torch.dtype) -> StoredWeight:
    """Return the inputs ``first`` to ``end`` of ``weight``; as ``dtype``, if groups are cut apart by that."""
    if isinstance(weight, Tensor):
        return weight[:, first:end].clone()
    group = weight.group
    if first % group or (end % group and end < weight.shape[1]):
        return dequantised(weight, dtype)[:, first:end].clone()
    groups = slice(first // group, -(-end // group))
    parts = {name: part[:, groups].clone() for name, part in _by_group(weight).items()}
    return replace(weight, codes=weight.codes[:, first:end].clone(), **parts)


def cat_rows(weights: Sequence[StoredWeight]) -> StoredWeight:
    """Put the outputs of ``weights`` one below the other.

    Raises:
        ValueError: they are held in different forms.
    """
    tensors = [weight for weight in weights if isinstance(weight, Tensor)]
    if len(tensors) == len(weights):
        return _cat(tensors)
    coded = [weight for weight in weights if not isinstance(weight, Tensor)]
    first = coded[0]
    alike = all(weight.kind == first.kind and weight.group == first.group for weight in coded)
    levels = [weight.levels for weight in coded if isinstance(weight, Int4Weight)]
    if tensors or not alike or not all(_same(each, levels[0]) for each in levels):
        raise ValueError("weights that are computed as one are held in different forms")
    parts = [_by_group(weight) for weight in coded]
    joined: dict[str, Any] = {
        "codes": _cat([w.codes for w in coded]),
        "scales": _cat([w.scales for w in coded]),
    }
    if any("zeros" in each for each in parts):
        zeros = [each.get("zeros", torch.full_like(each["scales"], CENTRE)) for each in parts]
        joined["zeros"] = torch.cat(zeros)
    return replace(first, **joined)


def _by_group(weight: Int4Weight | Fp8Weight) -> dict[str, Any]:
    """Return the parts that have a number for each output and group, by their names."""
    zeros = weight.zeros if isinstance(weight, Int4Weight) else None
    return {"scales": weight.scales} | ({} if zeros is None else {"zeros": zeros})


def _cat(parts: Sequence[Tensor]) -> Tensor:
    """Put rows one below the other."""
    device = parts[0].device
    if device.type != "cpu":
        return torch.cat([*parts])
    shape = sum(map(len, parts)), *parts[0].shape[1:]
    return torch.cat([*parts], out=reusable(shape, parts[0].dtype))


def _round(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Round float32 ``[N, group]``; return codes, uint8 like it, and scales ``[N, 1]``."""
    extreme = groups.gather(1, groups.abs().argmax(dim=1, keepdim=True))
    best_codes = torch.full_like(groups, CENTRE, dtype=torch.uint8)
    best_scales = torch.zeros_like(extreme)
    least = groups.square().sum(dim=1, keepdim=True)
    for steps in _STEPS_TO_EXTREME:
        scales = extreme / steps
        codes = (groups / scales).nan_to_num_(0).round_().clamp_(-CENTRE, CENTRE - 1)
        error = (codes * scales - groups).square().sum(dim=1, keepdim=True)
        better = error < least
        least = torch.where(better, error, least)
        best_scales = torch.where(better, scales, best_scales)
        best_codes = torch.where(better, (codes + CENTRE).to(torch.uint8), best_codes)
    return best_codes, best_scales


def _round_natively(rows: Tensor, group: int, codes: Tensor, scales: Tensor) -> None:
    """Round float32 ``[N, in]`` as ``_round`` does, into codes and scales of as many rows."""
    steps, width = torch.tensor(_STEPS_TO_EXTREME), lib().vector_width()
    room = torch.empty(3, -(-group // width) * width)
    lib().round_codes(
        weights=rows.data_ptr(),
        rows=len(rows),
        num_in=rows.shape[1],
        group=group,
        steps=steps.data_ptr(),
        num_steps=len(steps),
        room=room.data_ptr(),
        codes=codes.data_ptr(),
        scales=scales.data_ptr(),
    )


def _check_codes(codes: Tensor, scales: Tensor, group: int) -> None:
    num_out, num_in = codes.shape
    if scales.shape != (num_out, -(-num_in // group)):
        raise ValueError(
            f"codes {list(codes.shape)} in groups of {group}: {list(scales.shape)} scales"
        )


def _spread(values: Tensor, num_in: int, group: int) -> Tensor:
    return values.repeat_interleave(group, dim=1)[:, :num_in]


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)
