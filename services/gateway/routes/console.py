"""The console, and the state of the cluster that it shows."""

from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from fastapi import APIRouter, Request, Response
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse

from moesaic.services.gateway.console.collector import Collector
from moesaic.services.gateway.console.state import ClusterState, ExpertMap
from moesaic.services.gateway.gateway import gateway_of, record_of
from moesaic.services.gateway.generate.deliver import KEEP_ALIVE_S, EventStream, event
from moesaic.services.gateway.http.openapi import answers
from moesaic.services.gateway.http.reply import reply
from moesaic.services.gateway.http.request_record import while_connected
from moesaic.services.gateway.routes.json_route import JsonRoute

router = APIRouter(route_class=JsonRoute)

ASSETS = Path(__file__).parents[1] / "console/assets"
_TYPES = {".html": "text/html; charset=utf-8", ".js": "text/javascript", ".css": "text/css"}
FILES = {file.name: file for file in ASSETS.iterdir() if file.suffix in _TYPES}
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def _file(name: str) -> Response:
    return FileResponse(FILES[name], headers=_HEADERS, media_type=_TYPES[FILES[name].suffix])


@router.get("/console", include_in_schema=False)
async def console() -> Response:
    """The page."""
    return _file("index.html")


@router.get("/console/{name}", include_in_schema=False)
async def asset(name: str) -> Response:
    """A script or style of the page."""
    if name not in FILES:
        raise HTTPException(404, "no such file")
    return _file(name)


@router.get("/v1/moesaic/state", responses=answers(ClusterState, errors=(404, 503)))
async def state(request: Request) -> Response:
    """The state of the cluster now: processes, links, requests in flight, brownout, scaling, decisions."""
    return await while_connected(request.receive, _state(request))


@router.get("/v1/moesaic/experts", responses=answers(ExpertMap, errors=(404, 503)))
async def experts(request: Request) -> Response:
    """The holders of each expert, and its share of the recent rows of its layer."""
    return await while_connected(request.receive, _experts(request))


@router.get(
    "/v1/moesaic/events", responses=answers(ClusterState, stream=ClusterState, errors=(404, 503))
)
async def events(request: Request) -> Response:
    """The same as `/v1/moesaic/state` as server-sent events, every two seconds, until the gateway stops."""
    return EventStream(record_of(request), _events(request), KEEP_ALIVE_S)


async def _state(request: Request) -> Response:
    async with _watching(request) as collector:
        return reply(await collector.state())


async def _experts(request: Request) -> Response:
    async with _watching(request) as collector:
        await collector.state()
        return reply(collector.experts())


async def _events(request: Request) -> AsyncGenerator[bytes, None]:
    async with _watching(request) as collector:
        while not collector.ended:
            state = await collector.state()
            version = collector.version
            yield event(state)
            await collector.changed(version)
    yield b""


def _watching(request: Request) -> AbstractAsyncContextManager[Collector]:
    return gateway_of(request).collector.watching(record_of(request).tenant)
