"""Authentication of every call to a gRPC server, before it reaches a service."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import structlog
from prometheus_client import Counter

from moesaic.cluster.rpc.channels import AUTHORIZATION, BEARER
from moesaic.cluster.security.scopes import scope_of
from moesaic.cluster.security.tokens import TokenRefused, Tokens

log = structlog.get_logger()

_SAY_AGAIN_S = 10.0
_READ_S = 5.0  # time for an unknown caller to send its request
_NO_TOKEN = (
    "no token: give this caller the cluster's secret (MOESAIC_SECRET), or send metadata "
    "'authorization: Bearer TOKEN' with one from 'moesaic token'"
)
_refused = Counter("moesaic_grpc_refused", "gRPC calls rejected by authentication", ["status"])


class Authenticating(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs alone
    """Interceptor that admits calls whose token allows them, and refuses others with the reason.

    A stream is checked once, when it begins.
    """

    def __init__(self, tokens: Tokens, worker_id: str) -> None:
        self._tokens, self._worker_id = tokens, worker_id
        self._said_at = float("-inf")

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Choose the handler of a call: the service's own, or one that refuses."""
        method = handler_call_details.method
        needed = scope_of(method)
        if needed is None:
            return _read_soon(await continuation(handler_call_details))
        given = dict(handler_call_details.invocation_metadata).get(AUTHORIZATION, "")
        try:
            if not isinstance(given, str) or not given.startswith(BEARER):
                raise TokenRefused(_NO_TOKEN)
            self._tokens.check(given[len(BEARER) :], needed, self._worker_id)
        except TokenRefused as refused:
            return self._refusing(method, refused)
        return await continuation(handler_call_details)

    def _refusing(self, method: str, refused: TokenRefused) -> Any:
        known = refused.allowed_more
        status = grpc.StatusCode.PERMISSION_DENIED if known else grpc.StatusCode.UNAUTHENTICATED
        _refused.labels(status.name.lower()).inc()

        async def refuse(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            # Callers must not fill the log.
            if time.monotonic() > self._said_at + _SAY_AGAIN_S:
                self._said_at = time.monotonic()
                log.warning(
                    "call.refused", method=method[:100], peer=context.peer(), cause=str(refused)
                )
            await context.abort(status, str(refused))

        # A handler of streams, even for a unary method: it does not wait for the request.
        return grpc.stream_stream_rpc_method_handler(refuse)


def _read_soon(handler: Any) -> Any:
    """Bound the wait for a unary request to ``_READ_S``.

    A server serves a bounded number of calls at once, and unknown callers could occupy them all.
    """

    async def answer(requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            async with asyncio.timeout(_READ_S):
                request = await anext(requests)
        except (TimeoutError, StopAsyncIteration):
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "no request came")
        return await handler.unary_unary(request, context)

    return grpc.stream_unary_rpc_method_handler(
        answer,
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )
