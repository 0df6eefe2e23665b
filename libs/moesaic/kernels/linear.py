# Linear layers: y = x W^T + b, the weight held in the form in which this machine multiplies fastest.
#   Packed     float32 and bfloat16 on a CPU: blocked by oneDNN for its kernels, once, when loaded.
#   Int8       on a CPU: weights rounded per output, activations per row, products exact (VNNI).
#   Plain      everything else: the layout of the checkpoint.
#   Order      a row's result is bitwise the same whatever rows are beside it (see ``PackedLinear``).
"""Linear layers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

Quantization = Literal["none", "int8"]


class Linear(Protocol):
    """``[T, in]`` -> ``[T, out]``. Weights are constant."""

    @property
    def nbytes(self) -> int:
        """Bytes of the weights as they are held."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply the rows of ``x``; same dtype."""
        ...

    def prepare(self, x: Tensor) -> "Rows":
        """What ``multiply`` takes: done once where several linears take the same rows."""
        ...

    def multiply(self, rows: "Rows") -> Tensor:
        """Multiply prepared rows; in the dtype of the computation, which may be wider."""
        ...


def make_linear(
    weight: Tensor, bias: Tensor | None = None, quantization: Quantization = "none"
) -> Linear:
    """The fastest form of ``weight`` ``[out, in]`` and ``bias`` ``[out]`` where they are.

    Raises:
        ValueError: int8 is asked for elsewhere than on a CPU.
    """
    if quantization == "int8":
        if weight.device.type != "cpu":
            raise ValueError(f"int8 is only computed on a CPU, not on {weight.device}")
        return Int8Linear(weight, bias)
    if weight.device.type == "cpu" and _can_pack(weight.dtype):
        return PackedLinear(weight, bias)
    return PlainLinear(weight, bias)


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

    def prepare(self, x: Tensor) -> "Rows":
        """See ``Linear.prepare``."""
        return x

    def multiply(self, rows: "Rows") -> Tensor:
        """See ``Linear.multiply``."""
        assert isinstance(rows, Tensor)
        return self(rows)


class PackedLinear:
    """A weight in oneDNN's own layout, which about halves the time of a few rows.

    oneDNN adds up a row's products in an order that depends on the shape of the weight alone, but
    for single rows, where it may choose a kernel of their own; two rows avoid that one.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Pack ``weight``; the caller's is needed no longer."""
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
        self._bias = bias
        self._kernel: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default
        self.nbytes = weight.nbytes
        self._single_row_differs = _single_row_differs(*weight.shape, weight.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """See ``Linear``."""
        if self._single_row_differs and len(x) == 1:
            return self._multiply(x.expand(2, -1))[:1]
        return self._multiply(x)

    def prepare(self, x: Tensor) -> "Rows":
        """See ``Linear.prepare``."""
        return x

    def multiply(self, rows: "Rows") -> Tensor:
        """See ``Linear.multiply``."""
        assert isinstance(rows, Tensor)
        return self(rows)

    def _multiply(self, x: Tensor) -> Tensor:
        return self._kernel(x, self._packed, self._bias, "none", [], "")


class Int8Linear:
    """A weight of signed 8-bit integers with a scale for each output.

    Every row of ``x`` is rounded to 255 levels between plus and minus its largest entry, so nothing
    depends on other rows; products and sums are exact integers. The error is at most half a level
    of each factor: about 0.4 % of a row's largest entry, and of a weight row's.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Round ``weight``; the caller's is needed no longer."""
        largest = weight.float().abs().amax(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
        self._scales = largest / LEVELS
        rounded = (weight.float() / self._scales.unsqueeze(1)).round_().to(torch.int8)
        self._packed = torch.ops.onednn.qlinear_prepack(rounded, None)
        self._no_offsets = torch.zeros(len(rounded), dtype=torch.int64)
        self._bias = bias
        self._kernel: Callable[..., Tensor] = torch.ops.onednn.qlinear_pointwise.default
        self.nbytes = rounded.nbytes + self._scales.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """See ``Linear``."""
        return self.multiply(round_rows(x)).to(x.dtype)

    def prepare(self, x: Tensor) -> "Rows":
        """See ``Linear.prepare``."""
        return round_rows(x)

    def multiply(self, rows: "Rows") -> Tensor:
        """See ``Linear.multiply``; float32."""
        assert isinstance(rows, RoundedRows)
        out = self._kernel(
            rows.levels,
            1.0,
            ZERO,
            self._packed,
            self._scales,
            self._no_offsets,
            None,
            1.0,
            0,
            torch.float32,
            "none",
            [],
            "",
        )
        out.mul_(rows.scales)
        return out if self._bias is None else out.add_(self._bias)


LEVELS = 127
ZERO = 128  # x86 multiplies unsigned by signed bytes, so zero lies in the middle


@dataclass(frozen=True)
class RoundedRows:
    """Rows as ``(levels - ZERO) * scales``."""

    levels: Tensor  # uint8 [T, in]
    scales: Tensor  # float32 [T, 1]

    def __len__(self) -> int:
        """How many rows."""
        return len(self.levels)

    def split(self, sizes: Sequence[int]) -> "list[RoundedRows]":
        """Parts of so many rows each, as a tensor's method of that name."""
        levels, scales = (torch.split_with_sizes(t, sizes) for t in (self.levels, self.scales))
        return [RoundedRows(*part) for part in zip(levels, scales, strict=True)]

    def index_select(self, dim: int, index: Tensor) -> "RoundedRows":
        """The rows at ``index``, as a tensor's method of that name; ``dim`` is 0."""
        levels, scales = (t.index_select(dim, index) for t in (self.levels, self.scales))
        return RoundedRows(levels, scales)


Rows = Tensor | RoundedRows


def round_rows(x: Tensor) -> RoundedRows:
    """Round each row of ``x`` ``[T, in]`` to 255 levels of its own."""
    x = x.float()
    scales = torch.linalg.vector_norm(x, torch.inf, dim=-1, keepdim=True)
    scales = scales.clamp_min_(torch.finfo(torch.float32).tiny).div_(LEVELS)
    return RoundedRows((x / scales).round_().add_(ZERO).to(torch.uint8), scales)


def _can_pack(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    supported = torch.ops.mkldnn._is_mkldnn_bf16_supported
    return dtype == torch.float32 or (dtype == torch.bfloat16 and bool(supported()))


@lru_cache
def _single_row_differs(num_out: int, num_in: int, dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(num_out, num_in, generator=generator).to(dtype)
    x = torch.randn(2, num_in, generator=generator).to(dtype)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    one, two = (
        torch.ops.mkldnn._linear_pointwise(rows, packed, None, "none", [], "")
        for rows in (x[:1], x)
    )
    return not torch.equal(one, two[:1])
