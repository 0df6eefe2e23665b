"""Translation between our errors and gRPC statuses, for both ends of a call.

An error travels as a ``google.rpc.Status``, which clients of all languages read. It has code, text
and an ``ErrorInfo``: our stable code in capitals, with class and fields as metadata. If a retry can
help, it has a ``RetryInfo``.
"""

import inspect
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import structlog
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

from moesaic.errors import InvalidInput, MoesaicError, NotReady, Overloaded, PeerLost

log = structlog.get_logger()

_DOMAIN = "moesaic"
_MAX_BYTES = 1000  # of a text; the metadata of an answer, with its text twice, share 8 KiB
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
    """Return the error of a failed call to ``peer``: the peer's own, or one by the status."""
    try:
        told = rpc_status.from_call(rpc_error)  # type: ignore[arg-type]  # has what is read of a call
        info = ErrorInfo()
        if told is not None and any(detail.Unpack(info) for detail in told.details):
            return _CLASSES[info.metadata["class"]](**json.loads(info.metadata["fields"]))
    except (DecodeError, KeyError, TypeError, ValueError):  # a peer of another version
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
    details = {"class": type(error).__name__, "fields": json.dumps(fields, ensure_ascii=False)}
    code = grpc.StatusCode[error.grpc_status]
    status = Status(code=code.value[0], message=_shortened(str(error)))
    info = ErrorInfo(reason=error.code.upper(), domain=_DOMAIN, metadata=details)
    status.details.add().Pack(info)
    if error.retryable:
        retry = RetryInfo()
        retry.retry_delay.FromMilliseconds(round(getattr(error, "retry_after_s", 0.0) * 1000))
        status.details.add().Pack(retry)
    await context.abort(code, status.message, rpc_status.to_status(status).trailing_metadata)


def _shortened(value: Any) -> Any:
    """Cut a text, and replace characters that UTF-8 cannot encode."""
    if not isinstance(value, str):
        return value
    return value.encode("utf-8", "replace")[:_MAX_BYTES].decode("utf-8", "ignore")
