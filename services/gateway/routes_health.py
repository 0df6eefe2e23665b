"""Whether the gateway lives, whether it can answer, and what it counts."""

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import JSONResponse

from services.gateway.gateway import gateway_of
from services.gateway.problems import problem_of

router = APIRouter()


@router.get("/livez")
async def livez() -> dict[str, str]:
    """The event loop turns."""
    return {"status": "ok"}


@router.get("/health")
@router.get("/readyz")
async def readyz(request: Request) -> Response:
    """Requests can be answered; otherwise 503 with the failing checks."""
    failing = gateway_of(request).failing_checks()
    if not failing:
        return JSONResponse({"status": "ok", "failing": {}})
    checks = {name: str(error) for name, error in failing.items()}
    headers = problem_of(next(iter(failing.values()))).headers()
    return JSONResponse({"status": "not ready", "failing": checks}, 503, headers)


@router.get("/metrics")
async def metrics() -> Response:
    """Prometheus text."""
    return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)
