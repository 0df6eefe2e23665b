"""The API's description of itself (OpenAPI 3.1): what routes declare, and what is true of them all."""

from collections.abc import Iterator
from types import UnionType
from typing import Any, get_args

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from moesaic.services.gateway.access import is_open, scope_of
from moesaic.services.gateway.http.anthropic_errors import AnthropicErrorReply, is_anthropics
from moesaic.services.gateway.http.problems import ErrorReply

Responses = dict[int | str, dict[str, Any]]

_REF = "#/components/schemas/{name}"
_replies: dict[str, type[msgspec.Struct]] = {}  # that routes refer to, by name
_MEANINGS = {
    400: "The request cannot be honoured; `param` names the field",
    401: "No valid API key came with it",
    403: "The API key does not allow this",
    404: "There is no such model or object",
    408: "The client sends or reads too slowly",
    413: "The body is too large",
    415: "The body is compressed in an unknown way; `Accept-Encoding` lists the accepted codings",
    429: "The tenant's limits are reached; `Retry-After` says when to try again",
    500: "The server failed",
    503: "It cannot be answered now; `Retry-After` says when to try again",
    504: "It was not finished in the time there was",
    529: "Workers have no room for it now; `Retry-After` says when to try again",
}
_TELL_WHEN = (429, 503, 529)

READS_BODY = (400, 408, 413, 415)  # errors of every route that takes one
INFERENCE = (*READS_BODY, 404, 503, 504)


def answers(
    reply: Any, *, stream: Any = None, named: bool = False, errors: tuple[int, ...] = ()
) -> Responses:
    """Describe a route's answers, for its ``responses``.

    Args:
        reply: type of a successful answer, as msgspec writes it.
        stream: type of the events, if callers may ask for a stream.
        named: the events have names, the last one too; else the last one is ``[DONE]``.
        errors: statuses besides 500 and those that keys and limits bring.
    """
    content = {"application/json": {"schema": _schema_of(reply)}}
    if stream is not None:
        content["text/event-stream"] = {"itemSchema": _event_of(stream, named)}
    described: dict[str, Any] = {"content": content}
    if 400 in errors:
        names = "Fields of the body that are not known here and changed nothing"
        described["headers"] = {
            "X-Moesaic-Ignored": {"description": names, "schema": {"type": "string"}}
        }
    return {200: described, **{status: _error(status) for status in errors}}


def document(app: FastAPI, *, needs_keys: bool, has_limits: bool) -> dict[str, Any]:
    """Describe the whole API.

    Args:
        app: the application with the routes.
        needs_keys: callers must send API keys.
        has_limits: tenants may have limits.
    """
    described = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes
    )
    components = described.setdefault("components", {})
    for path, methods in described["paths"].items():
        for operation in methods.values():
            _complete(operation, path, needs_keys=needs_keys, has_limits=has_limits)
    if needs_keys:
        components["securitySchemes"] = {
            "api_key": {"type": "http", "scheme": "bearer"},
            "x_api_key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
    schemas = components.get("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    for name, schema in _schemas_of_replies().items():
        assert name not in schemas, f"two objects are called {name}"
        schemas[name] = schema
    components["schemas"] = schemas
    return described


def _complete(operation: Any, path: str, *, needs_keys: bool, has_limits: bool) -> None:
    responses = operation["responses"]
    # The framework's own, which is never sent.
    responses.pop("422", None)
    errors = [500]
    if needs_keys and not is_open(path):
        scope = scope_of(path)
        scopes = [scope] if scope else []
        operation["security"] = [{"api_key": scopes}, {"x_api_key": scopes}]
        errors += [401, *([403] if scope else []), *([429] if has_limits else [])]
    for status in errors:
        responses.setdefault(str(status), _error(status))
    if is_anthropics(path):
        for status, told in responses.items():
            if int(status) >= 400:
                told["content"]["application/json"]["schema"] = _schema_of(AnthropicErrorReply)
    operation["responses"] = dict(sorted(responses.items()))


def _error(status: int) -> dict[str, Any]:
    described: dict[str, Any] = {
        "description": _MEANINGS[status],
        "content": {"application/json": {"schema": _schema_of(ErrorReply)}},
    }
    if status in _TELL_WHEN:
        seconds = {"description": "Seconds to wait", "schema": {"type": "integer"}}
        described["headers"] = {"Retry-After": seconds}
    return described


def _event_of(kind: Any, named: bool) -> dict[str, Any]:
    """Describe one server-sent event: an object, whose type is its name.

    Without names an error may stand at the end, and ``[DONE]`` is last.
    """
    content = _schema_of(kind if named else kind | ErrorReply)
    as_json = {"contentMediaType": "application/json", "contentSchema": content}
    may_be: dict[str, Any] = as_json if named else {"anyOf": [{"const": "[DONE]"}, as_json]}
    properties: dict[str, Any] = {"event": {"type": "string"}} if named else {}
    properties["data"] = {"type": "string", **may_be}
    return {"type": "object", "properties": properties, "required": list(properties)}


def _schema_of(kind: Any) -> dict[str, Any]:
    """Make a type's schema; a struct's is only named: to work them all out takes 0.06 s of a gateway's start."""
    if isinstance(kind, UnionType):
        return {"anyOf": [_schema_of(one) for one in get_args(kind)]}
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        other = _replies.setdefault(kind.__name__, kind)
        assert other is kind, f"two replies are called {kind.__name__}"
        return {"$ref": _REF.format(name=kind.__name__)}
    return msgspec.json.schema(kind)


def _schemas_of_replies() -> dict[str, Any]:
    """Make the schemas of the structs that routes answer with, and of those within them, by name."""
    _, schemas = msgspec.json.schema_components(_replies.values(), ref_template=_REF)
    assert _replies.keys() <= schemas.keys(), "a reply shares its name with what another one holds"
    # They say nothing about answers, and the framework drops those that are None.
    list(_taken(schemas, "default"))
    return schemas


def _taken(node: Any, key: str) -> Iterator[Any]:
    """Take every value of ``key`` out of a document."""
    if isinstance(node, dict):
        if key in node:
            yield node.pop(key)
        node = list(node.values())
    if isinstance(node, list):
        for child in node:
            yield from _taken(child, key)
