"""Which devices' tensors torch takes together. Pure.

It is what CUDA builds do: one device for all, but numbers without dimensions may be on the host
where torch computes element by element, and indices may be on the host beside an indexed tensor of
the device.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

INDEXING = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
    aten._unsafe_index.Tensor,
}
# Element by element too, though torch does not tag them so.
ELEMENTWISE = {
    aten.fill.Tensor,
    aten.fill_.Tensor,
    aten.masked_fill.Tensor,
    aten.masked_fill_.Tensor,
    aten.where.self,
    aten.where.self_out,
}


def check_devices(func: Any, tensors: Sequence[Tensor], args: Sequence[Any]) -> None:
    """Raise ``RuntimeError`` as torch does if ``func`` would not take these tensors.

    Args:
        func: an operation of ATen; none that copies.
        tensors: all tensors among its arguments.
        args: its arguments by position.
    """
    if func in INDEXING:
        _check_indexing(args)
        return
    if len({tensor.device for tensor in tensors}) < 2:
        return
    elementwise = func in ELEMENTWISE or torch.Tag.pointwise in func.tags
    scalars = [each for each in tensors if each.device.type == "cpu" and not each.ndim]
    written = [
        value
        for argument, value in zip(func._schema.arguments, args, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    others = [each for each in tensors if not any(each is scalar for scalar in scalars)]
    mixed = len({each.device for each in others}) > 1
    on_host = any(any(each is scalar for scalar in scalars) for each in written)
    if mixed or on_host or not elementwise:
        raise RuntimeError(_two_devices(tensors, func))


def _check_indexing(args: Sequence[Any]) -> None:
    indexed, indices = args[0], [index for index in args[1] if index is not None]
    for index in indices:
        if index.device.type != "cpu" and index.device != indexed.device:
            raise RuntimeError(
                "indices should be either on cpu or on the same device as the indexed tensor "
                f"({indexed.device})"
            )
    value = args[2] if len(args) > 2 else None
    if (
        isinstance(value, Tensor)
        and value.device != indexed.device
        and (value.ndim or value.device.type != "cpu")
    ):
        raise RuntimeError(_two_devices([indexed, value], "index_put"))


def _two_devices(tensors: Sequence[Tensor], func: Any) -> str:
    names = sorted({str(tensor.device) for tensor in tensors}, reverse=True)
    return (
        "Expected all tensors to be on the same device, but found at least two devices, "
        f"{' and '.join(names)}! (in {func})"
    )
