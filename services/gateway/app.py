"""The REST application: routes, and every error as a problem."""

from collections.abc import Iterator

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

import moesaic
from moesaic.errors import MoesaicError
from moesaic.services.gateway.entry import Entry
from moesaic.services.gateway.gateway import Gateway, record_of
from moesaic.services.gateway.http.cors import with_cors
from moesaic.services.gateway.http.problems import (
    HttpProblem,
    invalid_fields,
    problem,
    problem_of,
)
from moesaic.services.gateway.routes import (
    batches,
    chat,
    classify,
    completions,
    console,
    decisions,
    docs,
    embeddings,
    files,
    health,
    messages,
    model,
    responses,
    score,
)
from moesaic.services.gateway.routes.json_route import JsonRoute

_CODES = {
    400: "invalid_request",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "request_too_large",
}
ROUTERS = (
    chat,
    completions,
    messages,
    responses,
    classify,
    decisions,
    score,
    embeddings,
    files,
    batches,
    model,
    health,
    docs,
    console,
)


class _Application(FastAPI):
    """FastAPI with one layer around the routes: the answers to errors.

    ``Entry`` answers unexpected errors and bounds bodies, and there are no traces. Each further layer takes time, and
    each open stream would hold its frame.
    """

    def build_middleware_stack(self) -> ASGIApp:
        """Make the layer."""
        return ExceptionMiddleware(self.router, self.exception_handlers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if self.middleware_stack is None:
            self.middleware_stack = self.build_middleware_stack()
        scope["app"] = self
        await self.middleware_stack(scope, receive, send)


def make_app(gateway: Gateway, *, shows_console: bool = False) -> ASGIApp:
    """Make the application of one gateway, for a listener that ``shows_console`` even where callers need keys."""
    app = _Application(
        title="Moesaic",
        version=moesaic.__version__,
        redirect_slashes=False,
        openapi_url=None,  # ``routes.docs`` has it, and a page without anything from elsewhere
    )
    app.state.gateway = gateway
    app.state.batch_endpoints = batches.endpoints(_routes())
    # Not included as routers, which would pass each request through two applications more.
    app.router.routes.extend(_routes())
    for kind in (MoesaicError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _on_error)
    entry, told = Entry(app, gateway, shows_console=shows_console), gateway.settings
    # The console's pages are its own alone.
    if shows_console:
        return entry
    return with_cors(
        entry,
        told.allowed_origins,
        told.allowed_methods,
        told.allowed_headers,
        told.allow_credentials,
    )


def body_types() -> Iterator[tuple[str, type[BaseModel]]]:
    """Give the paths that take JSON, with the types of their bodies."""
    for route in _routes():
        if isinstance(route, JsonRoute) and route.body_type is not None:
            yield route.path, route.body_type


def _routes() -> Iterator[BaseRoute]:
    return (route for routes in ROUTERS for route in routes.router.routes)


async def _on_error(request: Request, error: Exception) -> Response:
    """Answer an error of ours, of a validator, or of the framework: unknown paths and methods."""
    # Some errors are kept and raised again and again: each time would keep one more request.
    error.__traceback__ = None
    if isinstance(error, MoesaicError):
        return _answer(request, problem_of(error))
    if isinstance(error, RequestValidationError):
        return _answer(request, problem_of(invalid_fields(error.errors())))
    # Registered for it
    assert isinstance(error, HTTPException)
    status = error.status_code
    message = {
        404: f"no route {request.method} {request.url.path[:200]}; /docs lists those there are",
        405: f"{request.method} is not allowed here",
    }.get(status, str(error.detail)[:500])
    answer = problem(status, _CODES.get(status, "invalid_request"), message)
    if status == 405:
        answer.others = {"allow": ", ".join(sorted(_methods_of(request.url.path)))}
    return _answer(request, answer)


def _methods_of(path: str) -> set[str]:
    """List the methods of all routes at a path; the framework only knows those of the first."""
    methods = {
        method
        for route in _routes()
        if isinstance(route, APIRoute) and route.path_regex.match(path)
        for method in route.methods or ()
    }
    return methods | ({"HEAD"} if "GET" in methods else set())


def _answer(request: Request, answer: HttpProblem) -> Response:
    record_of(request).fail(answer)
    return record_of(request).refusal(answer)
