"""Whether the gateway lives, whether it can answer, and what it counts."""

import msgspec
from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import PlainTextResponse

from services.gateway.gateway import gateway_of
from services.gateway.openapi import answers
from services.gateway.problems import problem_of
from services.gateway.replies import reply

router = APIRouter()


NOT_READY = "Requests cannot be answered now; `failing` says why"


class Readiness(msgspec.Struct):
    """Whether requests can be answered, and the checks that say no."""

    status: str
    failing: dict[str, str]


_READINESS = answers(Readiness)
_READINESS[503] = {"description": NOT_READY, "content": _READINESS[200]["content"]}


@router.get("/livez")
async def livez() -> dict[str, str]:
    """The event loop turns."""
    return {"status": "ok"}


@router.get("/health", responses=_READINESS)
@router.get("/readyz", responses=_READINESS)
async def readyz(request: Request) -> Response:
    """Requests can be answered; otherwise 503 with the failing checks."""
    failing = gateway_of(request).failing_checks()
    if not failing:
        return reply(Readiness("ok", {}))
    answer = reply(Readiness("not ready", {name: str(error) for name, error in failing.items()}))
    answer.status_code = 503
    answer.headers.update(problem_of(next(iter(failing.values()))).headers())
    return answer


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics() -> Response:
    """Prometheus text."""
    return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)
