"""The outermost layer: ids, keys, body limits, and one log line and one count for every request."""

import asyncio
import hashlib
import secrets

import structlog
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway import metrics
from services.gateway.exchange import DEFAULT_TENANT, Exchange, is_request_id, route_of
from services.gateway.gateway import Gateway
from services.gateway.problems import Problem, internal_error, problem
from services.gateway.scopes import NO_KEY

log = structlog.get_logger()

BODY_S = 30.0  # longest pause within a request's body


class Edge:
    """Wraps the routes of one gateway."""

    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        self._app, self._gateway = app, gateway
        self._max_body_bytes = gateway.settings.max_body_bytes
        key = gateway.settings.api_key.get_secret_value()
        self._key_digest = _digest(key) if key else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request from its first byte to its last."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        given = headers.get("x-request-id")
        exchange = Exchange(
            given if is_request_id(given) else f"req-{secrets.token_hex(12)}", scope["method"]
        )
        scope.setdefault("state", {})["exchange"] = exchange
        with metrics.inflight.track_inprogress(), structlog.contextvars.bound_contextvars():
            structlog.contextvars.bind_contextvars(request_id=exchange.request_id)
            try:
                await self._handle(exchange, headers, scope, receive, send)
            finally:
                exchange.route = route_of(scope)
                self._gateway.release(exchange)
                exchange.close()

    async def _handle(
        self, exchange: Exchange, headers: Headers, scope: Scope, receive: Receive, send: Send
    ) -> None:
        async def send_noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                name = (b"x-request-id", exchange.request_id.encode())
                message["headers"] = [*message.get("headers", ()), name]
            await send(message)

        refused = self._refused(exchange, scope["path"], headers)
        if refused is not None:
            metrics.rejections.labels(refused.body.code).inc()
            exchange.fail(refused)
            return await refused.response()(scope, receive, send_noted)
        try:
            await self._app(scope, _Bounded(receive, self._max_body_bytes), send_noted)
        except Exception:
            # The routes have answered already if they could; this is the only place that sees the cause.
            log.exception("request.failed", request_id=exchange.request_id)
            failure = internal_error(exchange.request_id)
            answered = exchange.status != 0
            exchange.fail(failure)
            if not answered:
                await failure.response()(scope, receive, send_noted)

    def _refused(self, exchange: Exchange, path: str, headers: Headers) -> Problem | None:
        if self._key_digest is not None and path not in NO_KEY:
            scheme, _, key = headers.get("authorization", "").partition(" ")
            known = secrets.compare_digest(_digest(key.strip()), self._key_digest)
            if scheme.lower() != "bearer" or not known:
                message = "send the header authorization: Bearer with a valid API key"
                return problem(401, "invalid_api_key", message)
        exchange.tenant = DEFAULT_TENANT
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._max_body_bytes:
            return problem(413, "request_too_large", _too_large(self._max_body_bytes))
        return None


class _Bounded:
    """A request's body that may be neither too long nor too slow."""

    def __init__(self, receive: Receive, max_bytes: int) -> None:
        self._receive, self._left, self._max_bytes = receive, max_bytes, max_bytes
        self._complete = False

    async def __call__(self) -> Message:
        if self._complete:  # what comes now is the client's leaving
            return await self._receive()
        try:
            async with asyncio.timeout(BODY_S):
                message = await self._receive()
        except TimeoutError:
            raise HTTPException(408, f"no more of the body came within {BODY_S:g} s") from None
        if message["type"] == "http.request":
            self._complete = not message.get("more_body", False)
            self._left -= len(message.get("body", b""))
            if self._left < 0:
                raise HTTPException(413, _too_large(self._max_bytes))
        return message


def _too_large(max_bytes: int) -> str:
    return f"the body must be at most {max_bytes} bytes"


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
