# Linear layers: y = x W^T + b, the weight held in the form in which this machine multiplies fastest.
#   Packed     on a CPU, in any form: panels of outputs for our own kernels; x and y are float32.
#   Coded      on a GPU, codes: unpacked in registers, see triton/weight_tiles.
#   Plain      everything else: the layout of the checkpoint.
#   Order      a packed layer's row has the same bits whatever rows are beside it.
"""Linear layers."""

import ctypes
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from moesaic.kernels.coded_matrix import CodedMatrix, addresses, coded_form, keeps_codes
from moesaic.kernels.held_bytes import Quantization
from moesaic.kernels.packed_matrix import PackedMatrix, form_of
from moesaic.kernels.stored_weights import StoredWeight, dequantised
from moesaic.native.library import computes_on, in_floats, lib, scratch
from moesaic.native.structs import MatrixArgs


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
    weight: StoredWeight, bias: Tensor | None = None, quantization: Quantization = "none"
) -> Linear:
    """Bring ``weight`` ``[out, in]`` and ``bias`` ``[out]`` into their fastest form, on their device.

    Codes keep their form where there are kernels for them, and become numbers elsewhere.

    Raises:
        ValueError: a quantisation is asked for where it cannot be computed.
    """
    if computes_on(weight.device):
        return PackedLinear(PackedMatrix.of(weight, bias, form_of(weight, quantization)))
    check_quantization(weight.device, quantization)
    if not isinstance(weight, Tensor) and keeps_codes(weight.device) and coded_form(weight):
        return CodedLinear(CodedMatrix.of(weight, bias))
    plain = plain_weight(weight)
    return PlainLinear(plain, None if bias is None else bias.to(plain.dtype))


def activation_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype of activations, KV and sums beside weights of ``dtype``: on a CPU float32."""
    return torch.float32 if in_floats(device) else dtype


def plain_weight(weight: StoredWeight) -> Tensor:
    """Return ``weight`` as torch computes with it: on a CPU float32; on a GPU codes become bfloat16."""
    own = weight.dtype if isinstance(weight, Tensor) else torch.bfloat16
    return dequantised(weight, activation_dtype(own, weight.device))


def check_quantization(device: torch.device, quantization: Quantization) -> None:
    """Raise ``ValueError`` if torch would have to compute what is quantised at load."""
    if quantization == "none":
        return
    if device.type != "cpu":
        raise ValueError(f"{quantization} is only computed on a CPU, not on {device}")
    raise ValueError(
        f"{quantization} needs the kernels for CPUs, which a C compiler makes: install gcc"
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


class CodedLinear:
    """Codes that stay codes on a GPU."""

    def __init__(self, matrix: CodedMatrix) -> None:
        """Take the codes, and the bias if they have one."""
        self.matrix, self.nbytes = matrix, matrix.nbytes
        self._table = torch.tensor(addresses([matrix.parts]), device=matrix.device)

    def __call__(self, x: Tensor) -> Tensor:
        """See ``Linear``."""
        from moesaic.kernels.triton.grouped_products import linear

        return linear(x.contiguous(), self._table, self.matrix)

    def behind(self, first: int) -> Linear:
        """See ``Linear``."""
        matrix = self.matrix.behind(first)
        return CodedLinear(matrix) if matrix.is_aligned else _Behind(self, first)


@dataclass(frozen=True)
class _Behind:
    """Outputs that cannot be computed without those before them: they do not begin where a kernel can."""

    whole: Linear
    first: int
    nbytes: int = 0

    def __call__(self, x: Tensor) -> Tensor:
        return self.whole(x)[:, self.first :].contiguous()

    def behind(self, first: int) -> Linear:
        return _Behind(self.whole, self.first + first)


class PackedLinear:
    """A weight packed for the kernels for CPUs."""

    def __init__(self, matrix: PackedMatrix) -> None:
        """Take the weight."""
        self.matrix, self.nbytes = matrix, matrix.nbytes
        self._num_out, self._num_in = matrix.shape
        self._pointer = ctypes.pointer(matrix.c)
        self._scratch_per_row = lib().linear_scratch(matrix=matrix.c)

    def __call__(self, x: Tensor) -> Tensor:
        """See ``Linear``; the result is float32."""
        x, num_rows, num_in, num_out = x.float().contiguous(), len(x), self._num_in, self._num_out
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
        """Take ``weight`` ``[heads, out, in]``; a packed one is a copy in the same dtype."""
        self._shape = weight.shape
        self._weight = None if computes_on(weight.device) else plain_weight(weight)
        if self._weight is None:
            self._held = [PackedMatrix.of(head) for head in weight]
            self._matrices = (MatrixArgs * len(weight))(*(held.c for held in self._held))

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """Multiply into ``out``; both may be parts of wider tensors."""
        if self._weight is not None:
            out.copy_(torch.einsum("thi,hoi->tho", x, self._weight))
            return
        assert x.stride(2) == out.stride(2) == 1
        assert x.dtype == out.dtype == torch.float32
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
