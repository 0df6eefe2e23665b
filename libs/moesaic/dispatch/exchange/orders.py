"""What an exchange asks besides rows: the body of its frames. A frame without one is asked directly."""

from typing import Annotated, Literal

import msgspec

from moesaic.errors import FrameError
from moesaic.transport.frame import Frame


class Relay(msgspec.Struct, frozen=True, tag="relay"):
    """To an expert worker: ask ``instances`` of your node, you among them, and send one sum."""

    instances: list[int]
    budget_s: float


class Hold(msgspec.Struct, frozen=True, tag="hold"):
    """In a note to an expert worker: keep the sum until it is collected, or ``keep_s`` have passed."""

    ticket: int
    keep_s: float = 10.0


class Reduce(msgspec.Struct, frozen=True, tag="reduce"):
    """To an expert worker: add what ``instances`` of your node hold to your own, and send one sum."""

    instances: list[int]
    ticket: int
    budget_s: float


class Collect(msgspec.Struct, frozen=True, tag="collect"):
    """From one expert worker to another: give me what you hold."""

    ticket: int
    budget_s: float


class Measure(msgspec.Struct, frozen=True, tag="measure"):
    """To an expert worker: what do links inside your node cost? The reply's body is a ``LinkCost``."""

    instances: list[int]


class Attend(msgspec.Struct, frozen=True, tag="attend"):
    """From an attention worker to the expert worker that conducts: I am here; when is a trial, and may I
    measure? See ``trials.Conductor.beat``. The reply's body is a ``Beat``."""

    worker_id: str
    node: str
    slot_s: float = 0.0
    measures: bool = False


class Offer(msgspec.Struct, frozen=True, tag="offer"):
    """From one attention worker to another: send these rows with yours. The reply's tensor is their
    sum, its body a ``Verdict``. ``lane`` counts the batches of a step that are under way at once: those
    with the same number go together."""

    worker_id: str
    lane: Annotated[int, msgspec.Meta(ge=0, le=63)] = 0


class Verdict(msgspec.Struct, frozen=True, tag="verdict"):
    """What a worker should do with its next rows: offer them again; or send them by itself, or
    directly, for ``for_s``, and then offer again."""

    next: Literal["offer", "alone", "direct"]
    for_s: float = 0.0


Order = Relay | Hold | Reduce | Collect | Measure | Attend | Offer | Verdict

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)


def encode(order: Order) -> bytes:
    """The body that says ``order``."""
    return _encoder.encode(order)


def order_of(frame: Frame) -> Order | None:
    """What the frame's body says; ``None`` if it has none.

    Raises:
        FrameError: it says something else.
    """
    if not frame.body:
        return None
    try:
        return _decoder.decode(frame.body)
    except msgspec.DecodeError as error:
        raise FrameError("body", f"is no order: {error}") from error
