"""The serving side of pulls: peers get the experts that this worker holds, in pieces."""

from collections.abc import Awaitable

import torch
import xxhash

from moesaic.dispatch.host import ExpertHost
from moesaic.errors import InvalidInput
from moesaic.kernels.expert_layout import ExpertLayout
from moesaic.transport.contract import Handler
from moesaic.transport.frame import Frame, FrameKind

PULL = 1 << 15  # of a frame's flags: it asks for weights, not for an answer
PIECE_BYTES = 128 << 10  # so little that a step notices neither sending nor receiving one
COLUMNS = 16  # of int32: 64 bytes, of which every expert has a multiple


def pull_identity(model_digest: str, layout: ExpertLayout) -> int:
    """64 bits that two workers share only if they mean the same bytes: of one checkpoint, packed
    for one kind of processor."""
    return xxhash.xxh3_64_intdigest(f"{model_digest}|{layout.name}".encode())


def giving(host: ExpertHost, identity: int, others: Handler) -> Handler:
    """What answers pulls with the experts of ``host``, and leaves everything else to ``others``.

    A pull's tensor is int64 ``[1, 3]``: expert, first byte, number of bytes. The reply's is that
    part of the packed expert, int32 ``[bytes / 64, 16]``; its digest is the whole expert's.
    """

    def answer(request: Frame) -> Frame | Awaitable[Frame]:
        return _give(host, identity, request) if request.flags & PULL else others(request)

    return answer


def _give(host: ExpertHost, identity: int, request: Frame) -> Frame:
    if request.digest != identity:
        raise InvalidInput("frame.digest", "another model or kind of processor than here")
    shapes = [(tuple(tensor.shape), tensor.dtype) for tensor in request.tensors]
    if shapes != [((1, 3), torch.int64)]:
        raise InvalidInput("frame.tensors", f"a pull has one int64 [1, 3], got {shapes}")
    expert, start, length = request.tensors[0][0].tolist()
    held = host.held(request.layer, expert)
    if held is None or held.packed is None:
        raise InvalidInput("frame.layer", f"no expert {expert} of layer {request.layer} here")
    whole_rows = start % 64 == length % 64 == 0
    if not (whole_rows and start >= 0 and 0 < length <= PIECE_BYTES) or (
        start + length > len(held.packed)
    ):
        raise InvalidInput("frame.tensors", f"no {length} bytes from {start} here")
    part = held.packed[start : start + length].view(torch.int32)
    return Frame(
        kind=FrameKind.REPLY,
        request_id=request.request_id,
        epoch=request.epoch,
        layer=request.layer,
        seq=request.seq,
        digest=held.digest,
        tensors=[part.view(-1, COLUMNS)],
    )
