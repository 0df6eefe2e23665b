"""Routes that take a JSON body: it waits for its turn, is decoded and checked, and errors name the field."""

import re
from collections.abc import Awaitable, Callable, Coroutine
from inspect import iscoroutinefunction, signature
from typing import Any, get_type_hints

from fastapi import Request, Response
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from moesaic.errors import InvalidInput, MoesaicError
from moesaic.json_texts import TOO_DEEP, JsonRoom, pieces_of, too_deep
from moesaic.services.gateway.fields.bodies import InferenceWire, check_extras
from moesaic.services.gateway.gateway import gateway_of, record_of
from moesaic.services.gateway.http.problems import NO_OBJECT, field_name, invalid_body
from moesaic.services.gateway.http.request_record import ClientClosed

MAX_NAMED_STEPS = 8  # how deep into a body an error points
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_PLACE = re.compile(r"(.*) at line (\d+) column (\d+)", re.DOTALL)
_MARK = b"the value behind a name"
_SURROGATE = ("lone leading surrogate in hex escape", "unexpected end of hex escape")
# Bodies up to here are read at once: going to a thread and back takes as long as a tenth of that.
SHORT_BYTES = 1 << 15


class InvalidJson(MoesaicError):
    """A body that cannot be read."""

    code = "invalid_request"
    http_status = 400

    def __init__(self, reason: str) -> None:
        super().__init__(f"the body is not valid JSON: {reason}")


def decode_body(body: bytes) -> Any:
    """Decode a body.

    Raises:
        InvalidInput: it holds too much, is nested too deeply, or has half a surrogate pair; names the field.
        InvalidJson: it is not JSON in UTF-8.
    """
    body = body.removeprefix(_BYTE_ORDER_MARK)
    JsonRoom().take(body, "body")
    try:
        return from_json(body, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        raise _mistake(body, str(error)) from None


def _mistake(body: bytes, told: str) -> MoesaicError:
    """Say what the parser found, and in which field where the JSON itself is right."""
    try:
        body.decode()
    except UnicodeDecodeError:
        return InvalidJson("it is not UTF-8")
    found = _PLACE.fullmatch(told)
    if found is None:
        return InvalidJson(told)
    reason, line, column = found[1], int(found[2]), int(found[3])
    if reason == TOO_DEEP:
        return too_deep(_field_at(body[: _offset(body, line, column) - 1], num_steps=1))
    if reason in _SURROGATE:
        at = body.rfind(b"\\u", 0, _offset(body, line, column))
        fix = f"not valid Unicode: a lone surrogate at line {line} column {column}"
        return InvalidInput(_field_of_text(body[:at]), fix)
    return InvalidJson(told)


def _offset(body: bytes, line: int, column: int) -> int:
    """Find the byte at a place, in steps that are short."""
    start, left = 0, line - 1
    for piece in pieces_of(body):
        num_lines = piece.count(b"\n")
        if num_lines >= left:
            break
        start, left = start + len(piece), left - num_lines
    for _ in range(left):
        start = body.index(b"\n", start) + 1
    return start + column


def _field_at(begun: bytes, num_steps: int = MAX_NAMED_STEPS) -> str:
    """Name the field that a body ends in, of which this is the beginning."""
    path, _ = _last(begun)
    return field_name(["body", *path[:num_steps]])


def _field_of_text(begun: bytes) -> str:
    """Name the field that a body ends in, within a text; where that is a name, the field that has it."""
    path, value = _last(begun + b'":"%s"' % _MARK)
    if value == _MARK.decode():
        return field_name(["body", *path[:-1][:MAX_NAMED_STEPS]])
    return _field_at(begun)


def _last(begun: bytes) -> tuple[list[str | int], Any]:
    """Give the last value of an unfinished body, and the steps to it."""
    value = from_json(begun, allow_partial="trailing-strings")
    path: list[str | int] = []
    while value and isinstance(value, dict | list):
        step: Any = next(reversed(value)) if isinstance(value, dict) else len(value) - 1
        path.append(step)
        value = value[step]
    return path, value


class JsonRoute(APIRoute):
    """A route whose function takes a body and the request; one without a body is FastAPI's own.

    Raises:
        TypeError: its function takes a body, and something else besides the request.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        """Take what FastAPI's route takes."""
        super().__init__(*args, **options)
        if self.body_type is None:
            # Which the handler of FastAPI asks for
            self.app = AsyncExitStackMiddleware(self.app)
        else:
            self.app = _application(self.get_route_handler())

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Give the function that reads the body and calls the route's own."""
        body_type = self.body_type
        if body_type is None:
            return super().get_route_handler()
        return _handler(body_type, self.endpoint)

    @property
    def body_type(self) -> type[BaseModel] | None:
        """Type of its body; None: it takes none."""
        if self.body_field is None:
            return None
        plain = not self.dependencies and not self.param_convertors and self.status_code is None
        parameters = list(signature(self.endpoint).parameters)
        if not plain or parameters != ["body", "request"] or not iscoroutinefunction(self.endpoint):
            raise TypeError(
                f"{self.path}: expected async def f(body, request), and nothing else declared"
            )
        body_type: type[BaseModel] = get_type_hints(self.endpoint)["body"]
        return body_type


def _application(handle: Callable[[Request], Awaitable[Response]]) -> ASGIApp:
    """Make the application of a route.

    FastAPI's own keeps a stack of dependencies and handles errors once more. These routes have no dependencies, the
    application around them handles errors, and an open stream would hold all of that.
    """

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        response = await handle(Request(scope, receive, send))
        await response(scope, receive, send)

    return app


def _handler(
    body_type: type[BaseModel], endpoint: Callable[[Any, Request], Awaitable[Response]]
) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    infers = issubclass(body_type, InferenceWire)

    def read(content: bytes) -> tuple[BaseModel, list[str]]:
        """Read a body, and name its fields that change nothing."""
        decoded = decode_body(content)
        try:
            body = body_type.model_validate(decoded)
        except ValidationError as error:
            raise invalid_body(error) from error
        return body, check_extras(body)

    async def handle(request: Request) -> Response:
        gateway, record = gateway_of(request), record_of(request)
        content = await _content(request)
        record.num_bytes = len(content)
        if infers:
            gateway.enter(record)
        result = None
        if len(content) > SHORT_BYTES:
            result = await gateway.lane.work(record.tenant, read, content)
        await gateway.turnstile.turn(record.tenant)
        body, record.ignored = result or read(content)
        return await endpoint(body, request)

    return handle


async def _content(request: Request) -> bytes:
    """Receive the body.

    Raises:
        InvalidInput: its content type is not JSON.
        ClientClosed: it did not come whole.
        HTTPException: it is too large or too slow.
    """
    try:
        body = await request.body()
    except ClientDisconnect:
        raise ClientClosed from None
    if not body or not _is_json(request.headers.get("content-type", "")):
        raise InvalidInput("body", NO_OBJECT)
    return body


def _is_json(content_type: str) -> bool:
    kind, _, subtype = content_type.partition(";")[0].strip().lower().partition("/")
    return (
        kind == "application"
        and (subtype == "json" or subtype.endswith("+json"))
        and "/" not in subtype
    )
