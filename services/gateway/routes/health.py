"""Health: probes for life and readiness, and the metrics."""

import msgspec
from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import PlainTextResponse

from moesaic.services.gateway.gateway import gateway_of
from moesaic.services.gateway.http.openapi import answers
from moesaic.services.gateway.http.problems import problem_of
from moesaic.services.gateway.http.reply import reply
from moesaic.services.gateway.routes.json_route import JsonRoute

router = APIRouter(route_class=JsonRoute)


NOT_READY = "Requests cannot be answered now; `failing` says why"


class Readiness(msgspec.Struct, omit_defaults=True):
    """Readiness for requests, the checks that fail, and services of another protocol, which are not used."""

    status: str
    failing: dict[str, str]
    other_protocol: dict[str, str] = {}


_READINESS = answers(Readiness)
_READINESS[503] = {"description": NOT_READY, "content": _READINESS[200]["content"]}


@router.get("/livez")
async def livez() -> dict[str, str]:
    """The process answers. For liveness probes: restart the gateway if this fails for long.

    It says nothing about workers: a restart of the gateway would not bring those back.
    """
    return {"status": "ok"}


@router.get("/health", responses=_READINESS)
@router.get("/readyz", responses=_READINESS)
async def readyz(request: Request) -> Response:
    """Requests can be answered; otherwise 503 with the failing checks. For readiness and startup probes and load
    balancers: send no requests here while this fails.

    `/health` is the same as `/readyz`, under the name that clients of other servers know. Neither is for liveness
    probes: they fail while workers load or are lost, which no restart of the gateway mends.
    """
    gateway = gateway_of(request)
    failing = gateway.failing_checks()
    if not failing:
        return reply(Readiness("ok", {}, gateway.other_protocol))
    told = {name: str(error) for name, error in failing.items()}
    answer = reply(Readiness("not ready", told, gateway.other_protocol))
    answer.status_code = 503
    answer.headers.update(problem_of(next(iter(failing.values()))).headers())
    return answer


@router.get("/load")
async def load(request: Request) -> dict[str, int]:
    """Inference requests in flight at this gateway, as vLLM tells them. For load balancers."""
    return {"server_load": gateway_of(request).num_inflight}


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics() -> Response:
    """Prometheus text; the port that `--metrics-port` names serves the same, without a key."""
    return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)
