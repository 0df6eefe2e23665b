"""Routes that take a JSON body: who may begin, who waits for a turn, and what is read beside the event loop."""

from collections.abc import Awaitable, Callable, Coroutine
from inspect import iscoroutinefunction, signature
from typing import Any, get_type_hints

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from moesaic.errors import InvalidInput
from moesaic.services.gateway.fields.bodies import InferenceWire
from moesaic.services.gateway.fields.unsupported import check_extras
from moesaic.services.gateway.gateway import gateway_of, record_of
from moesaic.services.gateway.http.bodies import decode_body
from moesaic.services.gateway.http.disconnect import ClientClosed
from moesaic.services.gateway.http.problems import NO_OBJECT, invalid_fields

# Bodies up to here are read at once: going to a thread and back takes as long as a tenth of that.
SHORT_BYTES = 1 << 15


class JsonRoute(APIRoute):
    """A route whose function takes a body and the request; one without a body is FastAPI's own.

    Raises:
        TypeError: its function takes a body, and something else besides the request.
    """

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
            told = error.errors(include_url=False)
            raise invalid_fields([{**one, "loc": ("body", *one["loc"])} for one in told]) from error
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
