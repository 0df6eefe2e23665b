# Linear layers: y = x W^T + b, the weight held in the form in which this machine multiplies fastest.
#   Packed     float32 on a CPU, or int8 there: panels of outputs for our own kernels.
#   Plain      everything else: the layout of the checkpoint.
#   Order      a packed layer's row has the same bits whatever rows are beside it.
"""Linear layers."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from moesaic.kernels.packing import pack_rows
from moesaic.native.library import lib, scratch, usable
from moesaic.native.memory import huge_pages
from moesaic.native.structs import MatrixArgs

Quantization = Literal["none", "int8"]


class Linear(Protocol):
    """``[T, in]`` -> ``[T, out]``, same dtype. Weights are constant."""

    @property
    def nbytes(self) -> int:
        """Bytes of the weights as they are held."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply the rows of ``x``."""
        ...

    def behind(self, first: int) -> "Linear":
        """Return a layer of the outputs from the ``first`` on, with the same weights."""
        ...


def make_linear(
    weight: Tensor, bias: Tensor | None = None, quantization: Quantization = "none"
) -> Linear:
    """Bring ``weight`` ``[out, in]`` and ``bias`` ``[out]`` into their fastest form, on their device.

    Raises:
        ValueError: int8 is asked for where it cannot be computed.
    """
    if quantization == "int8":
        check_int8(weight)
        return PackedLinear(PackedMatrix.int8(weight, bias))
    if usable(weight):
        return PackedLinear(PackedMatrix.float32(weight, bias))
    return PlainLinear(weight, bias)


def check_int8(weight: Tensor) -> None:
    """Raise ``ValueError`` if ``weight`` cannot be computed with as int8."""
    if weight.device.type != "cpu":
        raise ValueError(f"int8 is only computed on a CPU, not on {weight.device}")
    if not usable(weight):
        raise ValueError(
            f"int8 needs float32 beside it, not {weight.dtype}"
            if weight.dtype != torch.float32
            else "int8 needs the kernels for CPUs, which a C compiler makes: install gcc"
        )


@dataclass(frozen=True)
class PlainLinear:
    """A weight as the checkpoint has it."""

    weight: Tensor
    bias: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """See ``Linear.nbytes``."""
        return self.weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """See ``Linear``."""
        return F.linear(x, self.weight, self.bias)

    def behind(self, first: int) -> Linear:
        """See ``Linear``."""
        return PlainLinear(self.weight[first:], None if self.bias is None else self.bias[first:])


@dataclass(frozen=True)
class _Behind:
    """Outputs that cannot be computed without those before them: they lie in one panel."""

    whole: Linear
    first: int
    nbytes: int = 0

    def __call__(self, x: Tensor) -> Tensor:
        return self.whole(x)[:, self.first :].contiguous()

    def behind(self, first: int) -> Linear:
        return _Behind(self.whole, self.first + first)


class PackedMatrix:
    """A weight as the kernels for CPUs read it: ``c`` points to ``held``."""

    def __init__(self, shape: Sequence[int], panels: Tensor, **others: Tensor | None) -> None:
        """Take the parts that ``float32`` or ``int8`` has packed of a weight of this ``shape``."""
        parts = {"panels": panels, **others}
        self.parts = {name: tensor for name, tensor in parts.items() if tensor is not None}
        self.shape = tuple(shape)
        self.nbytes = sum(tensor.nbytes for tensor in self.parts.values())
        self.c = MatrixArgs(**{name: tensor.data_ptr() for name, tensor in self.parts.items()})
        self.c.num_out, self.c.num_in = shape

    @classmethod
    def float32(
        cls, weight: Tensor, bias: Tensor | None = None, *, lasting: bool = True
    ) -> "PackedMatrix":
        """Pack ``weight`` ``[out, in]``; the caller's is needed no longer.

        A matrix that is not ``lasting`` keeps out of the memory for weights.
        """
        panels = _zeros((_whole_panels(len(weight)), weight.shape[1]), torch.float32, lasting)
        pack_rows(weight, panels)
        return cls(weight.shape, panels, bias=_padded(bias))

    @classmethod
    def int8(
        cls, weight: Tensor, bias: Tensor | None = None, *, lasting: bool = True
    ) -> "PackedMatrix":
        """Round ``weight`` to signed bytes with a scale for each output, and pack them.

        Rows to multiply are rounded too, to 255 levels between plus and minus their largest entry,
        so nothing depends on other rows; products and sums are exact integers. The error is at most
        half a level of each factor: about 0.4 % of a row's largest entry, and of a weight row's.
        """
        padded_out, padded_in = _whole_panels(len(weight)), -(-weight.shape[1] // 4) * 4
        panels = _zeros((padded_out, padded_in), torch.int8, lasting)
        scales, offsets = torch.empty(padded_out), torch.empty(padded_out, dtype=torch.int32)
        pack_rows(weight, panels, scales, offsets)
        return cls(weight.shape, panels, scales=scales, offsets=offsets, bias=_padded(bias))

    def behind(self, first: int) -> "PackedMatrix":
        """Return the outputs from the ``first`` on, which begins a panel."""
        assert first % lib().panel_width() == 0
        parts = {name: tensor[first:] for name, tensor in self.parts.items()}
        return PackedMatrix((self.shape[0] - first, self.shape[1]), **parts)


class PackedLinear:
    """A weight packed for the kernels for CPUs."""

    def __init__(self, matrix: PackedMatrix) -> None:
        """Take the weight."""
        self.matrix, self.nbytes = matrix, matrix.nbytes
        self._num_out, self._num_in = matrix.shape
        self._pointer = ctypes.pointer(matrix.c)
        self._scratch_per_row = (self._num_in + 8) if matrix.c.scales else 0

    def __call__(self, x: Tensor) -> Tensor:
        """See ``Linear``; float32."""
        x, num_rows, num_in, num_out = x.contiguous(), len(x), self._num_in, self._num_out
        assert x.shape == (num_rows, num_in)
        out = torch.empty(num_rows, num_out)
        per_row = self._scratch_per_row
        lib().linear(
            matrices=self._pointer,
            heads=1,
            x=x.data_ptr(),
            x_stride=num_in,
            x_head_stride=0,
            count=num_rows,
            out=out.data_ptr(),
            out_stride=num_out,
            out_head_stride=0,
            scratch=scratch(per_row * num_rows) if per_row else None,
            threads=torch.get_num_threads(),
        )
        return out

    def behind(self, first: int) -> Linear:
        """See ``Linear``."""
        if first % lib().panel_width():
            return _Behind(self, first)
        return PackedLinear(self.matrix.behind(first))


class HeadLinear:
    """A weight of its own for each head: ``[T, heads, in]`` -> ``[T, heads, out]``."""

    def __init__(self, weight: Tensor) -> None:
        """Take ``weight`` ``[heads, out, in]``; a packed one is a copy."""
        self._shape = weight.shape
        self._weight = None if usable(weight) else weight
        if self._weight is None:
            self._held = [PackedMatrix.float32(head) for head in weight]
            self._matrices = (MatrixArgs * len(weight))(*(held.c for held in self._held))

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """Multiply into ``out``; both may be parts of wider tensors."""
        if self._weight is not None:
            out.copy_(torch.einsum("thi,hoi->tho", x, self._weight))
            return
        assert x.stride(2) == out.stride(2) == 1
        assert x.shape[1:] == (self._shape[0], self._shape[2])
        lib().linear(
            matrices=self._matrices,
            heads=len(self._matrices),
            x=x.data_ptr(),
            x_stride=x.stride(0),
            x_head_stride=x.stride(1),
            count=len(x),
            out=out.data_ptr(),
            out_stride=out.stride(0),
            out_head_stride=out.stride(1),
            scratch=None,
            threads=torch.get_num_threads(),
        )


def _zeros(shape: tuple[int, int], dtype: torch.dtype, lasting: bool) -> Tensor:
    return huge_pages.zeros(shape, dtype) if lasting else torch.zeros(shape, dtype=dtype)


def _whole_panels(size: int) -> int:
    width: int = lib().panel_width()
    return -(-size // width) * width


def _padded(vector: Tensor | None) -> Tensor | None:
    if vector is None:
        return None
    padded = torch.zeros(_whole_panels(len(vector)))
    padded[: len(vector)] = vector
    return padded
