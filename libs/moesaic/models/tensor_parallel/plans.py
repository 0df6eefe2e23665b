"""The plan of a step, as it goes from the first rank to the others."""

from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from moesaic.kernels.decoder_step import Rotation
from moesaic.models.layers.attention_plan import AttentionPlan
from moesaic.models.tensor_parallel.contents import as_bytes, from_bytes


class _Told(msgspec.Struct, frozen=True, array_like=True):
    plan: AttentionPlan
    rotation: Rotation


def encode_plan(plan: AttentionPlan, rotation: Rotation) -> bytes:
    """Write the plan of a step and the rotations of its rows."""
    return msgspec.msgpack.encode(_Told(plan, rotation), enc_hook=_told)


def decode_plan(content: bytes, device: torch.device) -> tuple[AttentionPlan, Rotation]:
    """Read what ``encode_plan`` has written, its tensors on ``device``.

    Raises:
        msgspec.MsgspecError: it is something else.
    """
    told = msgspec.msgpack.decode(content, type=_Told, dec_hook=partial(_tensor, device))
    return told.plan, told.rotation


def _told(tensor: Tensor) -> tuple[str, tuple[int, ...], bytes]:
    """Write torch's name of the dtype, the shape and the content."""
    content: Any = as_bytes(tensor.cpu()).numpy()
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), content.tobytes()


def _tensor(device: torch.device, kind: type, told: tuple[str, tuple[int, ...], bytes]) -> Tensor:
    dtype, shape, written = told
    # By numpy: torch reads no empty buffer.
    content = torch.from_numpy(np.frombuffer(bytearray(written), dtype=np.uint8))
    return from_bytes(content, getattr(torch, dtype), tuple(shape)).to(device)
