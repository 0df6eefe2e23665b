"""Translation between our errors and gRPC statuses, for both ends of a call.

An error travels as its status and text, for anyone, and in the trailing metadata, for us:
``moesaic-error`` (the class), ``moesaic-code``, ``moesaic-fields`` (JSON) and, where a retry can
help, ``moesaic-retry-after`` in seconds.
"""

import inspect
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import structlog

from moesaic.errors import InvalidInput, MoesaicError, NotReady, Overloaded, PeerLost

log = structlog.get_logger()

_MAX_TEXT = 1000  # metadata shares a limit of 8 KiB
_CLASSES = {error.__name__: error for error in MoesaicError.__subclasses__()}
_LOST = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
}


@asynccontextmanager
async def errors_as_status(context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
    """End the call with the status of an error that leaves the block.

    An error of another kind becomes INTERNAL with a text that reveals nothing; its traceback is
    logged.
    """
    try:
        yield
    except MoesaicError as error:
        await _abort(context, error)
    except grpc.aio.AbortError:
        raise
    except Exception:
        log.exception("call.failed")
        await _abort(context, MoesaicError("internal error; the log of the service has the cause"))


def as_error(rpc_error: grpc.aio.AioRpcError, peer: str) -> MoesaicError:
    """Give the error of a failed call to ``peer``: the peer's own, or one by the status."""
    metadata: dict[str, Any] = dict(rpc_error.trailing_metadata() or ())  # type: ignore[arg-type]  # pairs, in the stubs a class
    known = _CLASSES.get(str(metadata.get("moesaic-error", "")))
    if known is not None:
        try:
            return known(**json.loads(metadata["moesaic-fields"]))
        except (KeyError, TypeError, ValueError):  # a peer of another version
            pass
    status, details = rpc_error.code(), rpc_error.details() or "no details"
    if status in _LOST:
        return PeerLost(peer, _cause(status, details))
    if status is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return Overloaded(f"{peer}: {details}")
    if status is grpc.StatusCode.FAILED_PRECONDITION:
        return NotReady(f"{peer}: {details}")
    if status is grpc.StatusCode.INVALID_ARGUMENT:
        return InvalidInput("request", f"{peer}: {details}")
    return MoesaicError(f"{peer}: {status.name.lower()}: {details}")


def _cause(status: grpc.StatusCode, details: str) -> str:
    if status is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "no answer before the deadline"
    return details


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: MoesaicError) -> None:
    fields = {
        name: _shortened(getattr(error, name))
        for name in inspect.signature(type(error).__init__).parameters
        if hasattr(error, name)
    }
    metadata = [
        ("moesaic-error", type(error).__name__),
        ("moesaic-code", error.code),
        ("moesaic-fields", json.dumps(fields)),
    ]
    if error.retryable:
        metadata.append(("moesaic-retry-after", f"{getattr(error, 'retry_after_s', 0.0):g}"))
    await context.abort(
        grpc.StatusCode[error.grpc_status],
        str(error)[:_MAX_TEXT],
        trailing_metadata=tuple(metadata),
    )


def _shortened(value: Any) -> Any:
    return value[:_MAX_TEXT] if isinstance(value, str) else value
