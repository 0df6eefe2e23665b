"""The gateway's readiness, and what is missing for it."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from moesaic.cli.clients.gateway import client_settings
from moesaic.cli.terminal.outcome import CommandError, Exit

POLL_S = 0.25
ASK_TIMEOUT_S = 5.0
SETTLE_S = 2.0  # a shorter wait is not worth a line


async def readiness(client: httpx.AsyncClient) -> list[str] | None:
    """Ask the gateway for its readiness.

    Returns:
        Reasons why it is not ready, none if it is; None without an answer.
    """
    return (await readiness_and_unused(client))[0]


async def readiness_and_unused(client: httpx.AsyncClient) -> tuple[list[str] | None, list[str]]:
    """Ask the gateway for its readiness, and for the services that it does not use, with the reason of each."""
    try:
        response = await client.get("/readyz", timeout=ASK_TIMEOUT_S)
    except httpx.HTTPError:
        return None, []
    try:
        body = response.json()
    except ValueError:
        return [f"what answers there is no gateway (status {response.status_code})"], []
    unused = body.get("other_protocol") if isinstance(body, dict) else None
    told = [str(why) for why in unused.values()] if isinstance(unused, dict) else []
    ready = response.status_code == 200 and isinstance(body, dict) and body.get("status") == "ok"
    return [] if ready else _missing(body), told


def _missing(body: Any) -> list[str]:
    """List the failing checks in the body of ``/readyz``; at least one, even of a strange body."""
    failing = body.get("failing") if isinstance(body, dict) else None
    return [str(why) for why in failing.values()] if isinstance(failing, dict) else ["not ready"]


async def await_ready(
    url: str,
    within_s: float,
    announce: Callable[[str, str], None],
    progressed: Callable[[], bool] = lambda: False,
    lacks: Callable[[], Awaitable[list[str]]] | None = None,
) -> None:
    """Wait until the gateway at ``url`` is ready and nothing else lacks, and announce what is missing.

    Args:
        url: of the gateway.
        within_s: longest wait.
        announce: tells people, given a name and a text.
        progressed: true if weights have come since the last call; the wait begins anew then.
        lacks: asks what else is missing once the gateway is ready.

    Raises:
        CommandError: it is not ready in that time.
    """
    loop = asyncio.get_running_loop()
    started = since = loop.time()
    missing: list[str] | None = None
    announced: list[str] | None = None
    async with httpx.AsyncClient(**client_settings(url)) as client:
        while loop.time() - started < within_s:
            if progressed():
                started = loop.time()
            now_missing = await readiness(client)
            if now_missing == [] and lacks is not None:
                now_missing = await lacks()
            if now_missing == []:
                return
            if now_missing != missing:
                missing, since = now_missing, loop.time()
            elif missing and missing != announced and loop.time() - since >= SETTLE_S:
                announced = missing
                announce("suite", f"not ready yet: {'; '.join(missing)}")
            await asyncio.sleep(POLL_S)
    detail = "; ".join(missing) if missing else "the gateway does not answer"
    raise CommandError(f"not ready after {within_s:g} s: {detail}", Exit.TIMEOUT)
