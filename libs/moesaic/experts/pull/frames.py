"""Frames of pulls: a range of a layer's share there, packed experts back.

Request
    ``layer``; ``digest``: see ``contents_digest``. Tensor int64 ``[1, 2]``: the first byte in the
    layer's share, and the number of bytes.
Reply
    tensors: these bytes of the packed experts, int32 ``[1, bytes / 4]``; the digests of their
    pieces, int64 ``[1, pieces]``, none if the bytes are not whole pieces. The bytes are a parcel where
    both sides can: then they go from the memory of one device to that of the other.
"""

import torch
import xxhash
from torch import Tensor

from moesaic.errors import InvalidInput
from moesaic.experts.pull.ranges import PULL_BYTES, Share
from moesaic.kernels.expert_layout import ExpertLayout
from moesaic.transport.frame import HEADER_BYTES, Frame, FrameKind, FrameLimits

# The largest messages of pulls: packed experts, or an error.
PULL_LIMITS = FrameLimits(
    max_rows=1, max_cols=PULL_BYTES // 4, max_bytes=HEADER_BYTES + PULL_BYTES + 4096
)


def contents_digest(model_digest: str, layout: ExpertLayout, share: Share) -> int:
    """64 bits that two workers have in common only if they mean the same bytes.

    These are of one checkpoint, packed for one kind of processor, divided in the same way.
    """
    return xxhash.xxh3_64_intdigest(f"{model_digest}|{layout.name}|{share}".encode())


def pull_request(layer: int, seq: int, start: int, length: int, contents: int) -> Frame:
    """Ask for ``length`` bytes from ``start`` of a layer's share of ``contents``."""
    return Frame(
        kind=FrameKind.REQUEST,
        layer=layer,
        seq=seq,
        digest=contents,
        tensors=[torch.tensor([[start, length]])],
    )


def contents_of(request: Frame) -> int:
    """The bytes that are meant, see ``contents_digest``."""
    return request.digest


def range_of(request: Frame) -> tuple[int, int]:
    """The first byte and the number of bytes that are asked for.

    Raises:
        InvalidInput: the frame has other tensors.
    """
    shapes = [(tuple(t.shape), t.dtype) for t in request.tensors]
    if shapes != [((1, 2), torch.int64)]:
        raise InvalidInput("frame.layer", f"has no experts of layer {request.layer} for {shapes}")
    start, length = request.tensors[0][0].tolist()
    return start, length


def pull_reply(request: Frame, packed: Tensor, digests: Tensor, *, lasting: bool) -> Frame:
    """Give ``packed``, uint8 ``[bytes]``, and the digests of its pieces, int64 ``[pieces]``.

    Only memory that does not change until it has been sent, which is ``lasting``, may travel apart.
    """
    tensors = [packed.view(torch.int32).unsqueeze(0), digests.unsqueeze(0)]
    return request.reply(tensors, parcels=int(lasting))


def pulled(reply: Frame, length: int, num_pieces: int) -> tuple[Tensor, Tensor] | None:
    """The bytes of a reply, uint8 ``[length]``, and the digests of their pieces.

    Returns:
        ``None`` if the reply has other sizes.
    """
    shapes = [(tuple(t.shape), t.dtype) for t in reply.tensors]
    if shapes != [((1, length // 4), torch.int32), ((1, num_pieces), torch.int64)]:
        return None
    return reply.tensors[0][0].view(torch.uint8), reply.tensors[1][0]
