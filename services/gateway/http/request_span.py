"""The span of an HTTP request: as the semantic conventions of OpenTelemetry have it, for HTTP and for models."""

from typing import TYPE_CHECKING

import structlog
from starlette.datastructures import Headers
from starlette.types import Scope

from moesaic.services.gateway.access import PROBED
from moesaic.services.gateway.http.request_record import NO_ROUTE, ClientClosed, RequestRecord
from moesaic.telemetry import spans

if TYPE_CHECKING:
    from opentelemetry.trace import Span

METHODS = {"CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "TRACE"}
MOST_CHARS = 200  # of what a client chooses
# The conventions' names for what routes do.
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
}


def begin_request_span(record: RequestRecord, scope: Scope, headers: Headers) -> "Span | None":
    """Begin the span of a request, within the caller's if it sends ``traceparent``; None: it is not traced."""
    made = spans.current()
    if made is None or scope["path"] in PROBED:
        return None
    from moesaic.telemetry.otlp import trace_id_of

    attributes = {
        "http.request.method": record.method if record.method in METHODS else "_OTHER",
        "url.path": scope["path"][:MOST_CHARS],
        "url.scheme": scope["scheme"],
        "network.protocol.version": scope["http_version"],
        "moesaic.request_id": record.request_id,
    }
    for name, header in (("server.address", "host"), ("user_agent.original", "user-agent")):
        if header in headers:
            attributes[name] = headers[header][:MOST_CHARS]
    # Its route is not known yet.
    name = record.method if record.method in METHODS else "HTTP"
    span = made.begin(name, headers, attributes, kind="SERVER")
    if span is not None:
        structlog.contextvars.bind_contextvars(trace_id=trace_id_of(span))
    return span


def end_request_span(span: "Span", record: RequestRecord) -> None:
    """End the span of a request; only the server's errors count as errors."""
    from moesaic.telemetry.otlp import mark_failed

    attributes: dict[str, str | int] = {
        "http.response.status_code": record.status,
        "moesaic.attempts": record.attempts,
    }
    if record.route != NO_ROUTE:
        span.update_name(f"{record.method} {record.route}")
        attributes["http.route"] = record.route
    if record.tenant:
        attributes["moesaic.tenant"] = record.tenant
    if record.model:
        operation = OPERATIONS.get(record.route, record.route.rpartition("/")[2])
        attributes["gen_ai.operation.name"] = operation
        attributes["gen_ai.provider.name"] = "moesaic"
        attributes["gen_ai.request.model"] = record.model
        attributes["gen_ai.usage.input_tokens"] = record.prompt_tokens
        attributes["gen_ai.usage.output_tokens"] = record.completion_tokens
    if record.code:
        attributes["moesaic.code"] = record.code
    span.set_attributes(attributes)
    # A stream may fail after its status was sent.
    breaks_off = record.status < 400 and record.code not in ("", ClientClosed.code)
    if record.status >= 500 or breaks_off:
        mark_failed(span, record.code or str(record.status))
    span.end()
