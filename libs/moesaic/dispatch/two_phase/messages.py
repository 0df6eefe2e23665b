"""Orders in the body of frames, and the replies to them.

A request without a body is asked directly, and so is one whose body has promises to its rows.

=============== ============================ =========================================
order           goes to                      reply
=============== ============================ =========================================
``Relay``       one expert worker of a node  the node's sum
``Hold``        its colleagues, as a note    none: the sum waits for ``Collect``
``Reduce``      one expert worker of a node  the node's sum
``Collect``     a colleague                  the sum that it holds
``JoinRequest`` an attention worker          sums, or none, with a ``JoinReply``
=============== ============================ =========================================
"""

from dataclasses import replace
from typing import Literal

import msgspec
import torch

from moesaic.errors import FrameError
from moesaic.experts.frames import FLOAT32_SUMS, PROMISED
from moesaic.transport.frame import Frame, FrameKind


class Relay(msgspec.Struct, frozen=True, tag="relay"):
    """Ask ``instances`` of your node, you among them, and send one sum."""

    instances: list[int]
    budget_s: float


class Hold(msgspec.Struct, frozen=True, tag="hold"):
    """Keep the sum until it is collected, or ``keep_s`` have passed."""

    ticket: int
    keep_s: float = 10.0


class Reduce(msgspec.Struct, frozen=True, tag="reduce"):
    """Add sums that ``instances`` of your node hold to your own, and send one."""

    instances: list[int]
    ticket: int
    budget_s: float


class Collect(msgspec.Struct, frozen=True, tag="collect"):
    """Give your colleague the sum that you hold."""

    ticket: int
    budget_s: float


class JoinRequest(msgspec.Struct, frozen=True, tag="join"):
    """Send these rows with yours."""

    worker_id: str


class JoinReply(msgspec.Struct, frozen=True, tag="advice"):
    """Advice for a worker's next rows.

    ``offer`` them again; or send them ``alone`` (in two phases, by itself) or ``direct`` for ``for_s``,
    and then offer again.
    """

    next: Literal["offer", "alone", "direct"]
    for_s: float = 0.0


Order = Relay | Hold | Reduce | Collect | JoinRequest | JoinReply

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)


def encode(order: Order) -> bytes:
    """Write the body that says ``order``."""
    return _encoder.encode(order)


def order_of(frame: Frame) -> Order | None:
    """Read the body of a frame.

    Returns:
        The order; ``None`` if the frame has none.

    Raises:
        FrameError: the body is no order.
    """
    if not frame.body or frame.flags & PROMISED:
        return None
    try:
        return _decoder.decode(frame.body)
    except msgspec.DecodeError as error:
        raise FrameError("body", f"is not a valid command: {error}") from error


def plain(request: Frame) -> Frame:
    """Make the request that asks for the same rows directly.

    Its sums are added up inside the node, where bytes cost little: they are float32.
    """
    is_float32 = [rows.dtype for rows in request.tensors[:1]] == [torch.float32]
    flags = 0 if is_float32 else FLOAT32_SUMS
    return replace(request, kind=FrameKind.REQUEST, flags=flags, digest=0, body=b"")
