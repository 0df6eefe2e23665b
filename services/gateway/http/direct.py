"""Routes that are called straight away: a JSON body, its checks, the function, its answer.

FastAPI declares and describes them as it does all others. Its own way to a function, through middleware, matching,
dependencies and the stacks that close these, costs a tenth of a millisecond, and none of these functions needs it.
"""

from collections.abc import Callable, Iterable
from inspect import iscoroutinefunction, signature
from typing import get_type_hints

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute
from starlette.types import Receive, Scope, Send

from moesaic.errors import InvalidInput, MoesaicError
from moesaic.services.gateway.http.bodies import decode_body
from moesaic.services.gateway.http.disconnect import ClientClosed
from moesaic.services.gateway.http.problems import NO_OBJECT, invalid_fields
from moesaic.services.gateway.http.request_record import RequestRecord
from moesaic.services.gateway.http.turnstile import Lane, Turnstile

# Bodies up to here are read at once: going to a thread and back takes as long as a tenth of that.
SHORT_BYTES = 1 << 15

Refuse = Callable[[Request, Exception], Response]
Check = Callable[[BaseModel], list[str]]
Enter = Callable[[RequestRecord, Callable[[str], bool]], None]
EnterOf = Callable[[type[BaseModel]], Enter | None]


class DirectRoute:
    """One route whose function takes a body and the request."""

    def __init__(
        self,
        route: APIRoute,
        body_type: type[BaseModel],
        refuse: Refuse,
        check: Check,
        enter: Enter | None,
        turnstile: Turnstile,
        lane: Lane,
    ) -> None:
        self._route, self.body_type, self._refuse, self._check = route, body_type, refuse, check
        self._enter, self._turnstile, self._lane = enter, turnstile, lane

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; errors that are not ours pass."""
        scope["route"] = self._route
        request = Request(scope, receive, send)
        record: RequestRecord = scope["state"]["record"]
        try:
            content = await _body(request)
            record.num_bytes = len(content)
            if self._enter is not None:
                self._enter(record, self._turnstile.give_way)
            read = None
            if len(content) > SHORT_BYTES:
                read = await self._lane.work(record.tenant, self._read, content)
            await self._turnstile.turn(record.tenant)
            body, record.ignored = read or self._read(content)
            response = await self._route.endpoint(body, request)
        except (MoesaicError, HTTPException) as error:
            response = self._refuse(request, error)
            # Some errors are kept and raised again and again: each time would keep one more request.
            error.__traceback__ = None
        await response(scope, receive, send)

    def _read(self, content: bytes) -> tuple[BaseModel, list[str]]:
        """Read a body, and name its fields that change nothing."""
        decoded = decode_body(content)
        try:
            body = self.body_type.model_validate(decoded)
        except ValidationError as error:
            told = error.errors(include_url=False)
            raise invalid_fields([{**one, "loc": ("body", *one["loc"])} for one in told]) from error
        return body, self._check(body)


def direct_routes(
    routes: Iterable[BaseRoute], refuse: Refuse, check: Check, enter: EnterOf
) -> dict[tuple[str, str], DirectRoute]:
    """Collect the routes that take a JSON body, by method and path.

    Args:
        routes: all routes.
        refuse: makes the answer that an error is.
        check: refuses a body for what its type does not say, and names fields that change nothing.
        enter: gives what counts a request with a type of body before anything is done for it, or refuses it.

    Raises:
        TypeError: a route is declared so that it cannot be called directly.
    """
    direct: dict[tuple[str, str], DirectRoute] = {}
    turnstile, lane = Turnstile(), Lane()  # of all of them
    for route in routes:
        if isinstance(route, APIRoute) and route.body_field is not None:
            body_type = _body_type(route)
            called = DirectRoute(route, body_type, refuse, check, enter(body_type), turnstile, lane)
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
