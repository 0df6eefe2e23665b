"""The API's description of itself: for programs as OpenAPI, for people as a page that RapiDoc makes of it.

The page needs nothing from other hosts: RapiDoc comes with the gateway, of the version that its ``LICENSE.txt`` names.
"""

from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, Response

from moesaic.services.gateway.gateway import gateway_of
from moesaic.services.gateway.http.openapi import document
from moesaic.services.gateway.routes.json_route import JsonRoute

router = APIRouter(route_class=JsonRoute, include_in_schema=False)

RAPIDOC = Path(__file__).parents[1] / "http/rapidoc/rapidoc-min.js.gz"
_PAGE = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>Moesaic API</title><script type="module" src="docs/rapidoc.js"></script></head>
<body><rapi-doc spec-url="openapi.json" load-fonts="false" render-style="view" show-header="false"></rapi-doc></body>
</html>
"""
# RapiDoc styles its parts by inline elements, and shows images that it carries within itself.
_POLICY = (
    "default-src 'none'; script-src 'self'; connect-src 'self'; "
    "style-src 'unsafe-inline'; img-src 'self' data:; base-uri 'none'; frame-ancestors 'none'"
)


@router.get("/openapi.json")
async def openapi(request: Request) -> Response:
    """OpenAPI 3.1."""
    app = request.app
    if app.openapi_schema is None:
        tenants = gateway_of(request).tenants
        app.openapi_schema = document(
            app, needs_keys=tenants.need_keys, has_limits=tenants.has_file
        )
    return JSONResponse(app.openapi_schema)


@router.get("/docs")
async def docs() -> Response:
    """The same as a page."""
    return HTMLResponse(_PAGE, headers={"content-security-policy": _POLICY})


@router.get("/docs/rapidoc.js")
async def rapidoc() -> Response:
    """The script of that page."""
    headers = {"content-encoding": "gzip", "cache-control": "max-age=86400"}
    return FileResponse(RAPIDOC, headers=headers, media_type="text/javascript")
