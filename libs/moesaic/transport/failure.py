"""Errors on the wire: the body of an ERROR frame, and the error made from it at the other end."""

from typing import Any

import msgspec

from moesaic import errors
from moesaic.errors import FrameError, MoesaicError
from moesaic.transport.frame import Frame, FrameKind

MAX_TEXT = 500

# Fields of each error, in the order of its constructor's arguments.
_FIELDS: dict[type[MoesaicError], tuple[str, ...]] = {
    errors.InvalidInput: ("field", "fix"),
    errors.ModelNotFound: ("model", "served"),
    errors.Overloaded: ("what", "retry_after_s"),
    errors.NotReady: ("what", "retry_after_s"),
    errors.StaleEpoch: ("sent", "current"),
    errors.ExpertUnavailable: ("layer", "num_experts", "cause"),
    errors.PlacementInfeasible: ("missing_slots", "missing_bytes"),
    errors.DeadlineExceeded: ("what", "budget_ms"),
    errors.PeerLost: ("peer", "cause"),
}
_CLASS_OF_NAME = {cls.__name__: cls for cls in _FIELDS}


class Failure(msgspec.Struct, frozen=True):
    """The body of an ERROR frame: a stable code, a text for people, and the error's own facts."""

    code: str
    message: str
    detail: dict[str, Any]


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Failure)


def failure_frame(request: Frame, error: MoesaicError) -> Frame:
    """Answer ``request`` with ``error``."""
    detail: dict[str, Any] = {"error": type(error).__name__}
    detail |= {name: getattr(error, name) for name in _FIELDS.get(type(error), ())}
    body = _ENCODER.encode(Failure(error.code, str(error)[:MAX_TEXT], detail))
    return Frame(
        kind=FrameKind.ERROR,
        request_id=request.request_id,
        epoch=request.epoch,
        layer=request.layer,
        seq=request.seq,
        body=body,
    )


def error_of(frame: Frame) -> MoesaicError:
    """Read the error of an ERROR frame; one of an unknown class becomes a plain ``MoesaicError``.

    Raises:
        FrameError: the body is not of the form that ``failure_frame`` writes.
    """
    try:
        failure = _DECODER.decode(frame.body)
        cls = _CLASS_OF_NAME.get(failure.detail.get("error", ""))
        error = (
            cls(*(failure.detail[name] for name in _FIELDS[cls]))
            if cls
            else MoesaicError(failure.message)
        )
    except (msgspec.DecodeError, KeyError, TypeError, ValueError) as problem:
        raise FrameError("body", f"is not an error: {problem}") from problem
    error.code = failure.code  # type: ignore[misc]  # the sender's may be narrower than the class's
    return error
