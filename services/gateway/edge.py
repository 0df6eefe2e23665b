"""The outermost layer: ids, keys, body limits, and one log line and one count for every request."""

import asyncio
import secrets
from collections.abc import Iterator, Mapping

import structlog
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway import metrics
from services.gateway.batches.upload import MAX_FORM_BYTES
from services.gateway.disconnect import ClientClosed
from services.gateway.exchange import Exchange, is_request_id, route_of
from services.gateway.gateway import Gateway
from services.gateway.limits import TenantLimited
from services.gateway.problems import Problem, internal_error, problem, problem_of
from services.gateway.scopes import NO_KEY, scope_of
from services.gateway.tenants import DEFAULT, Tenant

log = structlog.get_logger()

BODY_S = 30.0  # longest pause within a request's body


class Edge:
    """Wraps the routes of one gateway."""

    def __init__(
        self, app: ASGIApp, direct: Mapping[tuple[str, str], ASGIApp], gateway: Gateway
    ) -> None:
        """``direct`` are the routes that are called past the application, by method and path."""
        self._app, self._direct, self._gateway = app, direct, gateway
        self._max_body_bytes = gateway.settings.max_body_bytes

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
        structlog.contextvars.bind_contextvars(request_id=exchange.request_id)  # of this task only
        with metrics.inflight.track_inprogress():
            try:
                await self._handle(exchange, headers, scope, receive, send)
            finally:
                exchange.route = route_of(scope)
                self._gateway.release(exchange)
                exchange.leave()
                exchange.close()

    async def _handle(
        self, exchange: Exchange, headers: Headers, scope: Scope, receive: Receive, send: Send
    ) -> None:
        complete = False

        async def send_noted(message: Message) -> None:
            nonlocal complete
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                message["headers"] = [*message.get("headers", ()), *_added_headers(exchange)]
            elif not message.get("more_body", False):
                complete = True
                exchange.leave()  # before its client can know: what that sends next finds the place free
            await send(message)

        max_body_bytes = self._max_body_bytes
        if scope["path"] == "/v1/files" and self._gateway.store is not None:
            max_body_bytes = MAX_FORM_BYTES  # it goes to the disk, not into memory
        refused = self._refused(exchange, scope, headers, max_body_bytes)
        if refused is not None:
            metrics.rejections.labels(refused.body.code).inc()
            exchange.fail(refused)
            return await refused.response()(scope, receive, send_noted)
        route = self._direct.get((scope["method"], scope["path"]), self._app)
        try:
            scope["app"] = self._app
            await route(scope, _Bounded(receive, max_body_bytes), send_noted)
            if not complete and not exchange.code:  # nobody else has noticed
                exchange.fail(problem_of(ClientClosed()))
        except Exception:
            # The routes have answered already if they could; this is the only place that sees the cause.
            log.exception("request.failed", request_id=exchange.request_id)
            failure = internal_error(exchange.request_id)
            answered = exchange.status != 0
            exchange.fail(failure)
            if not answered:
                await failure.response()(scope, receive, send_noted)

    def _refused(
        self, exchange: Exchange, request: Scope, headers: Headers, max_body_bytes: int
    ) -> Problem | None:
        """Why a request is turned away before its body is read; notes whose it is."""
        path = request["path"]
        tenant: Tenant | None = request["state"].get("caller")  # of a batch, from within
        needed = None if tenant is not None else scope_of(path)
        if tenant is None and path not in NO_KEY:
            tenant = self._caller(headers)
            if tenant is None:
                message = "send the header authorization: Bearer with a valid API key"
                return problem(401, "invalid_api_key", message)
        if tenant is not None:
            exchange.tenant = tenant.name
            structlog.contextvars.bind_contextvars(tenant=tenant.name)
            if needed is not None and needed not in tenant.scopes:
                allowed = ", ".join(sorted(tenant.scopes))
                message = f"this needs an API key that allows {needed}; yours allows {allowed}"
                return problem(403, "insufficient_scope", message)
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > max_body_bytes:
            return problem(413, "request_too_large", _too_large(max_body_bytes))
        return _limited(exchange, tenant)

    def _caller(self, headers: Headers) -> Tenant | None:
        if not self._gateway.tenants.need_keys:
            return DEFAULT
        scheme, _, key = headers.get("authorization", "").partition(" ")
        tenant = self._gateway.tenants.find(key.strip())
        known = tenant is not None and scheme.lower() == "bearer" and not tenant.is_expired
        return tenant if known else None


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


def _limited(exchange: Exchange, tenant: Tenant | None) -> Problem | None:
    """Let the request into its tenant's allowance, or say why not."""
    if tenant is None or tenant.allowance is None:
        return None
    try:
        exchange.enter(tenant.allowance)
    except TenantLimited as error:
        return problem_of(error)
    return None


def _added_headers(exchange: Exchange) -> Iterator[tuple[bytes, bytes]]:
    yield b"x-request-id", exchange.request_id.encode()
    if exchange.ignored:
        yield b"x-moesaic-ignored", ", ".join(exchange.ignored).encode()
    if exchange.allowance is not None and (exchange.status < 300 or exchange.status == 429):
        for name, value in exchange.allowance.headers():
            yield name.encode(), value.encode()
