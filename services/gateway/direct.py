"""Routes that are called straight away: a JSON body, its checks, the function, its answer.

FastAPI declares and describes them as it does all others. Its own way to a function, through middleware, matching,
dependencies and the stacks that close these, costs a tenth of a millisecond, and none of these functions needs it.
"""

import json
from collections.abc import Callable, Iterable
from inspect import signature
from typing import Any, get_type_hints

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from moesaic.errors import InvalidInput, MoesaicError
from services.gateway.disconnect import ClientClosed
from services.gateway.problems import NO_OBJECT, invalid_fields

Refuse = Callable[[Request, Exception], Response]  # the answer that an error is


class InvalidJson(MoesaicError):
    """A body cannot be read."""

    code = "invalid_request"
    http_status = 400

    def __init__(self, reason: str) -> None:
        super().__init__(f"the body is not valid JSON: {reason}")


class DirectRoute:
    """One route whose function takes a body and the request."""

    def __init__(self, route: APIRoute, body_type: type[BaseModel], refuse: Refuse) -> None:
        self._route, self._body_type, self._refuse = route, body_type, refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; errors that are not ours come out."""
        scope["route"] = self._route
        request = Request(scope, receive, send)
        try:
            body = self._checked(await _json(request))
            response = await self._route.endpoint(body, request)
        except (MoesaicError, HTTPException) as error:
            response = self._refuse(request, error)
        await response(scope, receive, send)

    def _checked(self, body: Any) -> BaseModel:
        try:
            return self._body_type.model_validate(body)
        except ValidationError as error:
            told = error.errors(include_url=False)
            raise invalid_fields([{**one, "loc": ("body", *one["loc"])} for one in told]) from error


def direct_routes(routes: Iterable[BaseRoute], refuse: Refuse) -> dict[tuple[str, str], ASGIApp]:
    """Those among the routes that can be called directly, by method and path."""
    direct: dict[tuple[str, str], ASGIApp] = {}
    for route in routes:
        if isinstance(route, APIRoute) and (body_type := _body_type(route)) is not None:
            for method in route.methods or ():
                direct[method, route.path] = DirectRoute(route, body_type, refuse)
    return direct


def _body_type(route: APIRoute) -> type[BaseModel] | None:
    """Type of the body, if that and the request are all that the function takes."""
    if list(signature(route.endpoint).parameters) != ["body", "request"]:
        return None
    body_type: type[BaseModel] = get_type_hints(route.endpoint)["body"]
    return body_type


async def _json(request: Request) -> Any:
    """The body.

    Raises:
        InvalidInput, InvalidJson: it is no JSON.
        ClientClosed: it did not come whole.
        HTTPException: it is too large or too slow.
    """
    try:
        body = await request.body()
    except ClientDisconnect:
        raise ClientClosed from None
    if not body or not _is_json(request.headers.get("content-type", "")):
        raise InvalidInput("body", NO_OBJECT)
    try:
        return json.loads(body)
    except json.JSONDecodeError as error:
        reason = f"{error.msg[:1].lower()}{error.msg[1:]}"
        place = f"at line {error.lineno} column {error.colno}"
        raise InvalidJson(f"{reason} {place}") from error
    except UnicodeDecodeError as error:
        raise InvalidJson("it is not UTF-8") from error
    except ValueError as error:
        raise InvalidJson("a number has too many digits") from error
    except RecursionError as error:
        raise InvalidJson("it is nested too deeply") from error


def _is_json(content_type: str) -> bool:
    kind, _, subtype = content_type.partition(";")[0].strip().lower().partition("/")
    return kind == "application" and (subtype == "json" or subtype.endswith("+json"))
