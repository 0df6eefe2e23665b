"""The API's description of itself, for programs and for people."""

from typing import Any

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from moesaic.services.gateway.gateway import Gateway, gateway_of
from moesaic.services.gateway.http.docs_page import HEADERS, page_of
from moesaic.services.gateway.http.openapi import document

router = APIRouter(include_in_schema=False)


@router.get("/openapi.json")
async def openapi(request: Request) -> Response:
    """OpenAPI 3.1."""
    return JSONResponse(_document(request.app, gateway_of(request)))


@router.get("/docs")
async def docs(request: Request) -> Response:
    """The same as a page that needs nothing from elsewhere."""
    return HTMLResponse(page_of(_document(request.app, gateway_of(request))), headers=HEADERS)


def _document(app: FastAPI, gateway: Gateway) -> dict[str, Any]:
    if app.openapi_schema is None:
        tenants = gateway.tenants
        app.openapi_schema = document(
            app, needs_keys=tenants.need_keys, has_limits=tenants.has_file
        )
    return app.openapi_schema
