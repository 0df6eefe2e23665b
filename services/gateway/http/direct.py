"""Routes that are called straight away: a JSON body, its checks, the function, its answer.

FastAPI declares and describes them as it does all others. Its own way to a function, through middleware, matching,
dependencies and the stacks that close these, costs a tenth of a millisecond, and none of these functions needs it.
"""

import asyncio
from collections.abc import Callable, Iterable
from inspect import iscoroutinefunction, signature
from typing import get_type_hints

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from moesaic.errors import InvalidInput, MoesaicError
from moesaic.services.gateway.http.bodies import decode_body
from moesaic.services.gateway.http.disconnect import ClientClosed
from moesaic.services.gateway.http.problems import NO_OBJECT, invalid_fields
from moesaic.services.gateway.http.turnstile import Turnstile

# Bodies up to here are read at once: going to a thread and back takes as long as a tenth of that.
SHORT_BYTES = 1 << 15

Refuse = Callable[[Request, Exception], Response]  # the answer that an error is


class DirectRoute:
    """One route whose function takes a body and the request."""

    def __init__(
        self, route: APIRoute, body_type: type[BaseModel], refuse: Refuse, turnstile: Turnstile
    ) -> None:
        self._route, self._body_type, self._refuse = route, body_type, refuse
        self._turnstile = turnstile

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; errors that are not ours pass."""
        scope["route"] = self._route
        request = Request(scope, receive, send)
        try:
            content = await _body(request)
            body = None
            if len(content) > SHORT_BYTES:
                body = await asyncio.to_thread(self._read, content)
            await self._turnstile.turn(scope["state"]["record"].tenant)
            if body is None:
                body = self._read(content)
            response = await self._route.endpoint(body, request)
        except (MoesaicError, HTTPException) as error:
            response = self._refuse(request, error)
            # Some errors are kept and raised again and again: each time would keep one more request.
            error.__traceback__ = None
        await response(scope, receive, send)

    def _read(self, content: bytes) -> BaseModel:
        body = decode_body(content)
        try:
            return self._body_type.model_validate(body)
        except ValidationError as error:
            told = error.errors(include_url=False)
            raise invalid_fields([{**one, "loc": ("body", *one["loc"])} for one in told]) from error


def direct_routes(routes: Iterable[BaseRoute], refuse: Refuse) -> dict[tuple[str, str], ASGIApp]:
    """Collect the routes that take a JSON body, by method and path.

    Raises:
        TypeError: a route is declared so that it cannot be called directly.
    """
    direct: dict[tuple[str, str], ASGIApp] = {}
    turnstile = Turnstile()  # of all of them
    for route in routes:
        if isinstance(route, APIRoute) and route.body_field is not None:
            called = DirectRoute(route, _body_type(route), refuse, turnstile)
            direct |= {(method, route.path): called for method in route.methods or ()}
    return direct


def _body_type(route: APIRoute) -> type[BaseModel]:
    plain = not route.dependencies and not route.param_convertors and route.status_code is None
    parameters = list(signature(route.endpoint).parameters)
    if not plain or parameters != ["body", "request"] or not iscoroutinefunction(route.endpoint):
        raise TypeError(
            f"{route.path}: expected async def f(body, request), and nothing else declared"
        )
    body_type: type[BaseModel] = get_type_hints(route.endpoint)["body"]
    return body_type


async def _body(request: Request) -> bytes:
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
