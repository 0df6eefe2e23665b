"""The REST application: routes, and every error as a problem."""

from collections.abc import Iterator

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

import moesaic
from moesaic.errors import MoesaicError
from services.gateway import (
    routes_batches,
    routes_chat,
    routes_classify,
    routes_completions,
    routes_decisions,
    routes_docs,
    routes_files,
    routes_health,
    routes_model,
    routes_score,
)
from services.gateway.direct import direct_routes
from services.gateway.edge import Edge
from services.gateway.gateway import Gateway, exchange_of
from services.gateway.problems import (
    Problem,
    internal_error,
    invalid_fields,
    problem,
    problem_of,
)

_CODES = {
    400: "invalid_request",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "request_too_large",
}
ROUTERS = (
    routes_chat,
    routes_completions,
    routes_classify,
    routes_decisions,
    routes_score,
    routes_files,
    routes_batches,
    routes_model,
    routes_health,
    routes_docs,
)


def make_app(gateway: Gateway) -> ASGIApp:
    """The application of one gateway."""
    app = FastAPI(
        title="Moesaic",
        version=moesaic.__version__,
        redirect_slashes=False,
        openapi_url=None,  # routes_docs has it, and pages that need nothing from elsewhere
    )
    app.state.gateway = gateway
    app.state.batch_endpoints = routes_batches.endpoints(_routes())
    for routes in ROUTERS:
        app.include_router(routes.router)
    for kind in (MoesaicError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _on_error)
    app.add_exception_handler(Exception, _on_unexpected)
    return Edge(app, direct_routes(_routes(), _refusal), gateway)


def _routes() -> Iterator[BaseRoute]:
    return (route for routes in ROUTERS for route in routes.router.routes)


async def _on_error(request: Request, error: Exception) -> Response:
    return _refusal(request, error)


async def _on_unexpected(request: Request, error: Exception) -> Response:
    return _answer(request, internal_error(exchange_of(request).request_id))


def _refusal(request: Request, error: Exception) -> Response:
    """The answer to an error of ours, of a validator, or of the framework: unknown paths and methods."""
    if isinstance(error, MoesaicError):
        return _answer(request, problem_of(error))
    if isinstance(error, RequestValidationError):
        return _answer(request, problem_of(invalid_fields(error.errors())))
    assert isinstance(error, HTTPException)  # registered for it
    status = error.status_code
    message = {
        404: f"no route {request.method} {request.url.path[:200]}; /docs lists those there are",
        405: f"{request.method} is not allowed here",
    }.get(status, str(error.detail)[:500])
    answer = problem(status, _CODES.get(status, "invalid_request"), message)
    if status == 405:
        answer.allow = ", ".join(sorted(_methods_of(request.url.path)))
    return _answer(request, answer)


def _methods_of(path: str) -> set[str]:
    """Methods of all routes at a path; the framework only knows those of the first."""
    return {
        method
        for route in _routes()
        if isinstance(route, APIRoute) and route.path_regex.match(path)
        for method in route.methods or ()
    }


def _answer(request: Request, answer: Problem) -> Response:
    exchange_of(request).fail(answer)
    return answer.response()
