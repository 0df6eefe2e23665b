"""Frames between attention workers and expert workers: a layer's rows there, sums back.

Request
    Tensors: hidden states ``[T, H]``, or packed ones (``wire_rows``); ``AssignmentBasis``, encoded;
    and if the sender has gated itself, weights float32 ``[T, k]`` and ids int32 ``[T, k]``.
    ``flags``: ``UNSUMMED``, ``FLOAT32_SUMS``, ``PROMISED`` or 0. ``PROMISED``: the body has promises to the
    rows (``promises``), and ids are the gate's own; else these may be of united experts, or -1.
Reply
    First tensor: the partial sum in the form of the rows, or no rows if this worker's experts have none.
    If the basis has loads: those of all workers of the placement, int64 ``[1, N]``.
    If the request has promises: the number of degraded choices of each row, int8 ``[T, 1]``.
    ``digest``: digest of the decision about all workers.
Reply to ``FLOAT32_SUMS``
    The same, but the sum is float32 ``[T, H]`` for any form of rows.
Reply to ``UNSUMMED``
    Tensors: results float32 ``[n, H]`` and their places int64 ``[n, 1]``, see
    ``SlotTable.compute_choices``; loads as above. ``digest``: the same.

Rows may be a parcel, which travels from device to device; then the sum of the reply is one as well. All
other tensors are read by the host, and stay within the frame.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from moesaic.experts.brownout.promises import decode_promises, encode_promises
from moesaic.experts.wire_rows import is_sum_of, like_rows
from moesaic.kernels.promised import PromisedRows
from moesaic.transport.frame import Frame, FrameKind

UNSUMMED = 1  # flag of a request that has the sender's own choice of experts
FLOAT32_SUMS = 2  # flag of a request whose sums are added up before they go on
PROMISED = 4  # flag of a request whose body has promises to its rows


def layer_request(
    step_id: bytes,
    epoch: int,
    layer: int,
    seq: int,
    tensors: Sequence[Tensor],
    *,
    promised: PromisedRows | None = None,
    unsummed: bool = False,
    apart: bool = False,
) -> Frame:
    """Ask one worker for its part of a batch; ``tensors`` as in the table above.

    With ``apart`` the rows are a parcel.
    """
    return Frame(
        threshold=promised.lowest if promised else 1.0,
        body=encode_promises(promised) if promised else b"",
        kind=FrameKind.REQUEST,
        request_id=step_id,
        epoch=epoch,
        layer=layer,
        seq=seq,
        flags=(UNSUMMED if unsummed else 0) | (PROMISED if promised else 0),
        tensors=list(tensors),
        parcels=int(apart),
    )


def wants_unsummed(request: Frame) -> bool:
    """True if the sender adds up the experts of a row itself."""
    return bool(request.flags & UNSUMMED)


def promises_of(request: Frame, device: torch.device) -> PromisedRows | None:
    """Promises to the rows of a request; ``None``: they are promised everything.

    Raises:
        InvalidInput: the body has another form.
    """
    if not request.flags & PROMISED:
        return None
    return decode_promises(request.body, len(request.tensors[0]), device)


def travels_apart(request: Frame) -> bool:
    """True if rows and sums stay on the devices of both sides."""
    return bool(request.parcels) and not wants_unsummed(request)


def partial_sum(request: Frame, sums: Tensor) -> Tensor:
    """Bring ``sums``, float32 ``[T or 0, H]``, into the form in which the sender wants them."""
    return sums if request.flags & FLOAT32_SUMS else like_rows(sums, request.tensors[0])


def layer_reply(
    request: Frame,
    results: Sequence[Tensor],
    loads: Tensor | None,
    decision: int,
    promised: PromisedRows | None = None,
) -> Frame:
    """Answer a request.

    Args:
        request: it.
        results: the partial sum, or unsummed results and their places; they are complete, for the
            device has been waited for.
        loads: int64 ``[N]`` of all workers; ``None`` if the request had none.
        decision: from ``decision_digest``.
        promised: the rows, if the request promises them something.
    """
    more = [] if loads is None else [loads[None]]
    if promised is not None:
        more.append(promised.settle()[0].to(torch.int8)[:, None])
    apart = travels_apart(request)
    return request.reply([*results, *more], digest=decision, parcels=int(apart), settled=apart)


def decision_of(reply: Frame) -> int:
    """The digest of the decision, about all workers, that a reply rests on."""
    return reply.digest


def degraded_in(reply: Frame) -> Tensor:
    """Count the degraded choices of each row, int8 ``[T]``, as the reply to a request with promises has them."""
    return reply.tensors[-1][:, 0]


def is_partial_sum(reply: Frame, rows: Tensor, *, promised: bool = False) -> bool:
    """True if a reply has a partial sum of all ``rows`` or none, and counts of degraded choices if the rows
    were ``promised`` something."""
    found = [(list(tensor.shape), tensor.dtype) for tensor in reply.tensors[1:]]
    expected = [([len(rows), 1], torch.int8)] if promised else []
    return found == expected and bool(reply.tensors) and is_sum_of(reply.tensors[0], rows)


def is_unsummed(reply: Frame, hidden_size: int) -> bool:
    """True if a reply has results float32 ``[n, H]`` and their places int64 ``[n, 1]``."""
    if len(reply.tensors) != 2:
        return False
    results, places = reply.tensors
    shapes = [list(results.shape), list(places.shape)]
    return (results.dtype, places.dtype) == (torch.float32, torch.int64) and shapes == [
        [len(results), hidden_size],
        [len(results), 1],
    ]
