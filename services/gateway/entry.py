"""Entry of each request: its id, its key and the bound of its body; one log line and one count at its end.

Web pages in a user's browser must not reach a gateway whose callers need no key (``BrowserGuard``). A browser sends
the requests of any page to this machine. Two headers identify such requests. ``Host`` shows a name of another owner
that points to this machine (DNS rebinding). The headers that name the page are sent only by browsers. Other clients,
such as curl and the packages that upload files as forms, send none of these.
"""

import ipaddress
import re
import secrets
import socket
from collections.abc import Collection, Iterator
from contextlib import suppress
from urllib.parse import urlsplit

import structlog
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moesaic.addresses import is_address, is_everywhere
from moesaic.loopback import is_loopback
from moesaic.origins import ANY, listed
from moesaic.services.gateway import metrics
from moesaic.services.gateway.access import (
    BATCH_PRIORITY,
    DEFAULT,
    Tenant,
    TenantLimited,
    is_of_console,
    is_open,
    scope_of,
)
from moesaic.services.gateway.files.upload import MAX_FORM_BYTES
from moesaic.services.gateway.gateway import Gateway
from moesaic.services.gateway.http.anthropic_errors import (
    ID_HEADERS,
    anthropic_error,
    is_anthropics,
)
from moesaic.services.gateway.http.problems import HttpProblem, internal_error, problem, problem_of
from moesaic.services.gateway.http.receiving import CODINGS, BoundedBody, Inflated, too_large
from moesaic.services.gateway.http.request_record import (
    ClientClosed,
    RequestRecord,
    is_request_id,
    route_of,
)
from moesaic.services.gateway.http.request_span import begin_request_span, end_request_span

EVERYWHERE = ("0.0.0.0", "::")  # what listens there has other names
_ACCEPTED = ", ".join(CODINGS)
_SAFE = ("GET", "HEAD")
_MAX_SHOWN = 100
_AUTHORITY = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\s:@/\[\]]+))(?::\d*)?", re.ASCII)
_NUMERIC = re.compile(r"[0-9a-fx.]+", re.ASCII)  # such as 127.1, which means 127.0.0.1
_FIX = "set --api-key, or name it in --allowed-hosts"
log = structlog.get_logger()


class BrowserGuard:
    """Refuses requests that a page of another site has made."""

    def __init__(self, host: str, allowed_hosts: str, origins: Collection[str] = ()) -> None:
        """Guard a gateway.

        Args:
            host: the gateway listens there.
            allowed_hosts: its other names, with commas.
            origins: pages that may call it; ``*``: all.
        """
        self._origins = frozenset(origins)
        names = (host, *allowed_hosts.split(","))
        self._names = {_host_of(name.strip()) for name in names} - {"", *EVERYWHERE}
        # Nobody can point an address elsewhere, and a gateway in a container does not know that of its host.
        self._takes_addresses = not is_loopback(_host_of(host))

    def refusal(self, method: str, headers: Headers) -> HttpProblem | None:
        """Find what tells that a request is another site's."""
        # Each is told once by any client; to look at thousands would hold others up.
        for name in ("host", "origin", "referer"):
            if (times := len(headers.getlist(name))) > 1:
                return problem(
                    400, "invalid_request", f"the header {name} is there {times} times: send one"
                )
        host = headers.get("host", "")
        here = _host_of(host)
        # Only clients of HTTP/1.0 may leave the header out; no browser does.
        if "host" in headers and not self._answers_to(here):
            what = f"the host header names {host[:_MAX_SHOWN]!r}, which this gateway does not know"
            return problem(403, "host_not_allowed", f"{what}: {_FIX}")
        if "origin" in headers:
            if not self._origins.isdisjoint((headers["origin"], ANY)):
                return None
            return self._foreign("origin", headers["origin"], here)
        follows_link = (
            method in _SAFE
            and headers.get("sec-fetch-mode") == "navigate"
            # A frame within another site's page is no link.
            and headers.get("sec-fetch-dest", "document") == "document"
        )
        if headers.get("sec-fetch-site") == "cross-site" and not follows_link:
            what = "a page of another site must not use this gateway, which needs no key"
            return problem(403, "origin_not_allowed", f"{what}: set --api-key")
        # Browsers of before 2020 send forms without an origin.
        if method in _SAFE or "referer" not in headers:
            return None
        return self._foreign("referer", headers["referer"], here)

    def _foreign(self, header: str, page: str, here: str) -> HttpProblem | None:
        """``here`` is the host that the request is for."""
        host = _host_of(_authority_of(page))
        if host and (host == here or self._is_known(host)):
            return None
        what = f"the header {header} names {page[:_MAX_SHOWN]!r}, a page of another site"
        return problem(403, "origin_not_allowed", f"{what}: {_FIX} or --allowed-origins")

    def _answers_to(self, host: str) -> bool:
        if self._is_known(host):
            return True
        return self._takes_addresses and is_address(host) and not is_everywhere(host)

    def _is_known(self, host: str) -> bool:
        return host in self._names or is_loopback(host)


def _authority_of(url: str) -> str:
    """Take ``host:port`` out of the address of a page; empty: it is none of the web's."""
    try:
        parts = urlsplit(url)
    except ValueError:  # brackets that hold no address
        return ""
    return parts.netloc if parts.scheme in ("http", "https") else ""


def _host_of(authority: str) -> str:
    """Take the host out of ``host:port``, in the one spelling that hosts are compared in; empty: there is none."""
    if is_address(authority):
        return _spelled(authority)
    found = _AUTHORITY.fullmatch(authority)
    if found is None:
        return ""
    address, name = found.groups()
    if address is not None:
        return _spelled(address) if is_address(address) else ""
    if _NUMERIC.fullmatch(name):
        with suppress(OSError):
            return socket.inet_ntoa(socket.inet_aton(name))
    return str(name).lower().removesuffix(".")


def _spelled(address: str) -> str:
    parsed = ipaddress.ip_address(address)
    return str(getattr(parsed, "ipv4_mapped", None) or parsed)


class Entry:
    """The layer around the routes of one gateway."""

    def __init__(self, app: ASGIApp, gateway: Gateway, *, shows_console: bool = False) -> None:
        """Lead to ``app``.

        Args:
            app: the routes.
            gateway: the gateway.
            shows_console: this is the listener of the console. Others have no console where callers need keys.
        """
        self._app, self._gateway = app, gateway
        self._shows_console = shows_console or not gateway.tenants.need_keys
        self._max_body_bytes = gateway.settings.max_body_bytes
        told = gateway.settings
        host = told.console_host if shows_console else told.host
        # The console has pages of its own alone.
        origins = () if shows_console else listed(told.allowed_origins)
        self._guard = BrowserGuard(host, told.allowed_hosts, origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request from its first byte to its last."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        given = headers.get("x-request-id")
        record = RequestRecord(
            given if is_request_id(given) else f"req-{secrets.token_hex(12)}", scope["method"]
        )
        if is_anthropics(scope["path"]):
            record.error_form, record.id_headers = anthropic_error, ID_HEADERS
        scope.setdefault("state", {})["record"] = record
        # HEAD has the status and headers of GET (RFC 9110, section 9.3.2).
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        # Of this task only.
        structlog.contextvars.bind_contextvars(request_id=record.request_id)
        record.span = begin_request_span(record, scope, headers)
        with metrics.inflight.track_inprogress():
            try:
                await self._handle(record, headers, scope, receive, send)
            finally:
                record.route = route_of(scope)
                self._gateway.release(record)
                record.settle()
                record.close()
                if record.span is not None:
                    end_request_span(record.span, record)

    async def _handle(
        self, record: RequestRecord, headers: Headers, scope: Scope, receive: Receive, send: Send
    ) -> None:
        complete = False

        async def send_noted(message: Message) -> None:
            nonlocal complete
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message.get("headers", ()), *_added_headers(record)]
            elif complete:
                return
            elif record.method == "HEAD" or not message.get("more_body", False):
                complete = True
                # Before its client can know: its next request finds room.
                record.settle()
                if record.method == "HEAD":
                    message = {"type": "http.response.body"}
            await send(message)

        max_body_bytes = self._max_body_bytes
        if scope["path"] == "/v1/files" and self._gateway.store is not None:
            # It goes to the disk, not into memory.
            max_body_bytes = MAX_FORM_BYTES
        refused = self._refused(record, scope, headers, max_body_bytes)
        if refused is not None:
            metrics.rejections.labels(refused.body.code).inc()
            record.fail(refused)
            return await record.refusal(refused)(scope, receive, send_noted)
        try:
            receive = BoundedBody(receive, max_body_bytes)
            if codings := _codings(headers):
                receive = Inflated(receive, codings[0], max_body_bytes)
            await self._app(scope, receive, send_noted)
            # Nobody else has noticed.
            if not complete and not record.code:
                record.fail(problem_of(ClientClosed()))
        except Exception:
            # The routes have answered already if they could; this is the only place that sees the cause.
            log.exception("request.failed", request_id=record.request_id)
            failure = internal_error(record.request_id)
            answered = record.status != 0
            record.fail(failure)
            if not answered:
                await record.refusal(failure)(scope, receive, send_noted)

    def _refused(
        self, record: RequestRecord, request: Scope, headers: Headers, max_body_bytes: int
    ) -> HttpProblem | None:
        """Find a reason to refuse a request before its body is read; note its tenant."""
        path = request["path"]
        # Routes would match it without its last line break, and scopes would not.
        if "\n" in path:
            return problem(404, "not_found", "no route has a line break in its path")
        tenant: Tenant | None = request["state"].get("caller")  # of a batch, from within
        record.least_priority = 0 if tenant is None else BATCH_PRIORITY
        needed = None if tenant is not None else scope_of(path)
        if tenant is None and not self._gateway.tenants.need_keys:
            foreign = self._guard.refusal(request["method"], headers)
            if foreign is not None:
                return foreign
        if tenant is None and not is_open(path):
            tenant = self._caller(headers)
            if tenant is None:
                message = (
                    "send the header authorization: Bearer, or x-api-key, with a valid API key"
                )
                return problem(401, "invalid_api_key", message)
        if tenant is not None:
            record.tenant = tenant.name
            structlog.contextvars.bind_contextvars(tenant=tenant.name)
            if needed is not None and needed not in tenant.scopes:
                allowed = ", ".join(sorted(tenant.scopes))
                message = f"this needs an API key that allows {needed}; yours allows {allowed}"
                return problem(403, "insufficient_scope", message)
        if is_of_console(path) and not self._shows_console:
            where = "use the port that --console-port names"
            if not self._gateway.settings.console_port:
                where = "start the gateway with --console-port"
            message = f"callers of this listener need keys, so it has no console: {where}"
            return problem(404, "route_not_enabled", message)
        length = headers.get("content-length", "0")
        codings = _codings(headers)
        if len(codings) > 1 or not CODINGS.keys() >= set(codings):
            told = ", ".join(codings)[:40]
            what = (
                f"the body has the content-encoding {told}: send it plain, or as one of {_ACCEPTED}"
            )
            refused = problem(415, "unsupported_content_encoding", what)
            refused.others = {"accept-encoding": _ACCEPTED}
            return refused
        if length.isdecimal() and int(length) > max_body_bytes:
            return problem(413, "request_too_large", too_large(max_body_bytes))
        # A page that stays open is no request that its tenant waits for.
        return None if is_of_console(path) else _limited(record, tenant)

    def _caller(self, headers: Headers) -> Tenant | None:
        if not self._gateway.tenants.need_keys:
            return DEFAULT
        scheme, _, key = headers.get("authorization", "").partition(" ")
        # Clients of Anthropic's API send the key in a header of its own, perhaps behind a proxy with another one.
        for found in (key.strip() if scheme.lower() == "bearer" else "", headers.get("x-api-key")):
            tenant = self._gateway.tenants.find(found.strip()) if found else None
            if tenant is not None and not tenant.is_expired:
                return tenant
        return None


def _codings(headers: Headers) -> list[str]:
    """List what has to be undone to read the body, if there is one."""
    if headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers:
        return []
    told = ",".join(headers.getlist("content-encoding")).lower().split(",")
    return [coding for one in told if (coding := one.strip()) not in ("", "identity")]


def _limited(record: RequestRecord, tenant: Tenant | None) -> HttpProblem | None:
    """Charge the request to its tenant, or tell why not."""
    if tenant is None or tenant.allowance is None:
        return None
    try:
        record.charge(tenant.allowance)
    except TenantLimited as error:
        return problem_of(error)
    return None


def _added_headers(record: RequestRecord) -> Iterator[tuple[bytes, bytes]]:
    for header in record.id_headers:
        yield header, record.request_id.encode()
    if record.ignored:
        yield b"x-moesaic-ignored", ", ".join(record.ignored).encode()
    if record.allowance is not None and (record.status < 300 or record.status == 429):
        for name, value in record.allowance.headers():
            yield name.encode(), value.encode()
