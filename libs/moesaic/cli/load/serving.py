"""A load on a server of OpenAI's API, whoever made it."""

import asyncio
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from moesaic.cli.load.datasets.prompt import LoadPrompt
from moesaic.cli.load.generator import LoadClient, TimedRequest
from moesaic.cli.load.options.server import Backend
from moesaic.cli.terminal.outcome import CommandError, Exit
from moesaic.loopback import is_loopback

if TYPE_CHECKING:
    import httpx

ANSWER_S = 6 * 3600.0  # longest wait for an answer
RETRY_S = 0.5  # between tries of a server that is not ready


@dataclass(frozen=True)
class LoadServer:
    """A server and how it is asked.

    Attributes:
        url: of the server, without the route.
        backend: how prompts are sent.
        route: of all requests.
        model: that is asked for.
        headers: of all requests.
        extra: further fields of all bodies.
        insecure: any certificate will do.
    """

    url: str
    backend: Backend
    route: str
    model: str
    headers: Mapping[str, str]
    extra: Mapping[str, Any] = field(default_factory=dict)
    insecure: bool = False

    def body(self, prompt: LoadPrompt) -> dict[str, Any]:
        """Make the body of a request."""
        if self.backend == "openai-embeddings":
            return {"model": self.model, "input": prompt.content, **self.extra}
        most = {"max_tokens": prompt.answer_tokens}
        asked: dict[str, Any] = {"prompt": prompt.content}
        if self.backend == "openai-chat":
            asked = {"messages": [{"role": "user", "content": prompt.content}]}
            most = {"max_completion_tokens": prompt.answer_tokens}
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        return {"model": self.model, **asked, **most, **stream, **self.extra}

    def client(self) -> LoadClient:
        """Make a client of it.

        Raises:
            CommandError: its URL is wrong.
        """
        try:
            parts = urlsplit(self.url)
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            text = f"{self.url}: give the address of a server, such as http://127.0.0.1:8000"
            raise CommandError(text, Exit.USAGE)
        is_safe = parts.scheme == "https"
        return LoadClient(
            port or (443 if is_safe else 80),
            parts.path.rstrip("/") + self.route,
            host=parts.hostname,
            tls=_context(parts.hostname, self.insecure) if is_safe else None,
            answer_s=ANSWER_S,
        )


def _context(host: str, insecure: bool) -> ssl.SSLContext:
    """Make the context of a connection; as in all commands, a server on this machine needs no known authority."""
    context = ssl.create_default_context()
    if insecure or is_loopback(host):
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


@dataclass(frozen=True)
class LoadPlan:
    """The requests of a load, and their times.

    Attributes:
        prompts: one for each request.
        due: seconds, in order.
        most: requests in flight; None: any number.
        warmups: times that the first prompt is sent before.
        ready_s: longest wait for a first answer before all that; None: none is waited for.
        id_prefix: begins the id of each request.
    """

    prompts: Sequence[LoadPrompt]
    due: Sequence[float]
    most: int | None = None
    warmups: int = 0
    ready_s: float | None = None
    id_prefix: str = ""


@dataclass(frozen=True)
class LoadOutcome:
    """Requests with their answers, the seconds that they took, and the time when they began."""

    requests: list[TimedRequest]
    duration_s: float
    began: datetime


async def loaded(server: LoadServer, plan: LoadPlan) -> LoadOutcome:
    """Send a load, after requests that warm the server up.

    Raises:
        CommandError: the server is not ready in time.
    """
    bodies = [server.body(each) for each in plan.prompts]
    client = server.client()

    def plain(_: int) -> Mapping[str, str]:
        return server.headers

    def named(number: int) -> Mapping[str, str]:
        return {**server.headers, "x-request-id": f"{plan.id_prefix}{number}"}

    try:
        if plan.ready_s is not None:
            await _answered(client, bodies[0], plain, plan.ready_s)
        await client.open_loop([0.0] * plan.warmups, lambda _: bodies[0], plain, most=plan.most)
        began, started = datetime.now(), time.perf_counter()
        requests = await client.open_loop(plan.due, bodies.__getitem__, named, most=plan.most)
        # Reading the answers is not part of the load.
        last_s = max((each.end_s for each in requests), default=0.0)
        duration_s = min(last_s or 1e-9, time.perf_counter() - started)
        return LoadOutcome(requests, duration_s, began)
    finally:
        client.close()


async def _answered(client: LoadClient, body: Any, headers: Any, seconds: float) -> None:
    """Ask until there is a whole answer."""
    error = "none came"
    try:
        async with asyncio.timeout(seconds):
            while True:
                [one] = await client.open_loop([0.0], lambda _: body, headers)
                if one.complete:
                    return
                error = one.error
                await asyncio.sleep(RETRY_S)
    except TimeoutError:
        raise _not_ready(f"no whole answer in time: {error}") from None


def wait_for_models(client: "httpx.Client", seconds: float) -> float:
    """Wait until a server lists its models.

    Returns:
        The seconds that are left.

    Raises:
        CommandError: it does not in time.
    """
    import httpx

    until, error = time.monotonic() + seconds, ""
    while (left_s := until - time.monotonic()) > 0:
        try:
            response = client.get("/v1/models", timeout=left_s)
            if response.status_code < 500:
                return max(0.0, until - time.monotonic())
            error = f"status {response.status_code}"
        except httpx.TransportError as failure:
            error = str(failure)
        time.sleep(max(0.0, min(RETRY_S, until - time.monotonic())))
    raise _not_ready(error)


def _not_ready(why: str) -> CommandError:
    return CommandError(f"--ready-check-timeout-sec: the server is not ready: {why}", Exit.TIMEOUT)
