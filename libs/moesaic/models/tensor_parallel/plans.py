"""The plan of a step, as it goes from the first rank to the others."""

from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from moesaic.kernels.paged_rows import PagedRows
from moesaic.models.layers.attention_plan import AttentionPlan
from moesaic.models.layers.rope import Rotation
from moesaic.models.tensor_parallel.contents import as_bytes, from_bytes


class _Array(msgspec.Struct, frozen=True, array_like=True):
    dtype: str  # torch's name
    shape: tuple[int, ...]
    content: bytes


class _Rows(msgspec.Struct, frozen=True, array_like=True):
    first_rows: _Array
    num_rows: _Array
    lengths: _Array
    block_tables: _Array
    max_rows: int
    max_length: int


class _Told(msgspec.Struct, frozen=True, array_like=True):
    write_offsets: _Array
    groups: list[_Rows]
    block_size: int
    attending: _Array | None
    cos: _Array
    sin: _Array
    interleaved: bool


def encode_plan(plan: AttentionPlan, rotation: Rotation) -> bytes:
    """Write the plan of a step and the rotations of its rows."""
    return msgspec.msgpack.encode(
        _Told(
            _array(plan.write_offsets),
            [
                _Rows(
                    _array(rows.first_rows),
                    _array(rows.num_rows),
                    _array(rows.lengths),
                    _array(rows.block_tables),
                    rows.max_rows,
                    rows.max_length,
                )
                for rows in plan.groups
            ],
            plan.block_size,
            None if plan.attending is None else _array(plan.attending),
            _array(rotation.cos),
            _array(rotation.sin),
            rotation.interleaved,
        )
    )


def decode_plan(content: bytes, device: torch.device) -> tuple[AttentionPlan, Rotation]:
    """Read what ``encode_plan`` has written, its tensors on ``device``.

    Raises:
        msgspec.MsgspecError: it is something else.
    """
    told = msgspec.msgpack.decode(content, type=_Told)

    def tensor(array: _Array) -> Tensor:
        return _tensor(array).to(device)

    groups = tuple(
        PagedRows(
            tensor(rows.first_rows),
            tensor(rows.num_rows),
            tensor(rows.lengths),
            tensor(rows.block_tables),
            rows.max_rows,
            rows.max_length,
        )
        for rows in told.groups
    )
    attending = None if told.attending is None else tensor(told.attending)
    plan = AttentionPlan(tensor(told.write_offsets), groups, told.block_size, attending)
    return plan, Rotation(tensor(told.cos), tensor(told.sin), told.interleaved)


def _array(tensor: Tensor) -> _Array:
    content: Any = as_bytes(tensor.cpu()).numpy()
    return _Array(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), content.tobytes())


def _tensor(array: _Array) -> Tensor:
    content = torch.from_numpy(np.frombuffer(bytearray(array.content), dtype=np.uint8))
    return from_bytes(content, getattr(torch, array.dtype), array.shape)
