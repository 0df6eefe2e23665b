"""Frames of ``all-to-all``: one worker's rows for another in one round, sums back.

Request
    ``epoch``: the round; ``digest``: index of the sender's share. Tensors: hidden states ``[n, H]``,
    weights float32 ``[n, k]`` and ids int32 ``[n, k]``.
Reply
    tensor: sums float32 ``[n, H]``.
"""

from torch import Tensor

from moesaic.transport.frame import Frame, FrameKind


def rows_request(round_: int, layer: int, seq: int, sender: int, tensors: list[Tensor]) -> Frame:
    """Send rows to another worker; ``sender`` is the index of this worker's share."""
    return Frame(
        kind=FrameKind.REQUEST,
        epoch=round_,
        layer=layer,
        seq=seq,
        digest=sender,
        tensors=tensors,
    )


def round_of(request: Frame) -> int:
    """The round that rows belong to."""
    return request.epoch


def sender_of(request: Frame) -> int:
    """Index of the sender's share."""
    return request.digest
