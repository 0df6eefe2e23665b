"""The record of an HTTP request, logged and counted once at its end; a client that leaves ends its request."""

import asyncio
import re
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeGuard, TypeVar

import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope

from moesaic.errors import MoesaicError
from moesaic.services.gateway import metrics
from moesaic.services.gateway.access import PROBED, Places, TenantAllowance, TenantLimited
from moesaic.services.gateway.http.problems import ErrorForm, HttpProblem, openai_error
from moesaic.telemetry.metrics import series

if TYPE_CHECKING:
    from opentelemetry.trace import Span

log = structlog.get_logger()

Outcome = Literal["done", "errored", "cancelled"]
CLIENT_CLOSED = 499
NO_ROUTE = "other"  # in place of one
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
T = TypeVar("T")
LOOK_AFTER_S = 0.02  # to look is a task of its own, and many an answer is out by then


def is_request_id(value: str | None) -> TypeGuard[str]:
    """Tell if a caller's own request id can be used."""
    return value is not None and _REQUEST_ID.fullmatch(value) is not None


def route_of(scope: Scope) -> str:
    """Name the template of the route that matched: a closed set, unlike paths."""
    return str(getattr(scope.get("route"), "path", NO_ROUTE))


@dataclass(eq=False)
class RequestRecord:
    """One HTTP request, filled in on its way through the gateway."""

    request_id: str
    method: str
    tenant: str = ""  # whose request it is; empty while that is not known, and where nobody asks
    allowance: TenantAllowance | None = None  # what it is charged to; None: no limits
    started: float = field(default_factory=time.monotonic)
    route: str = NO_ROUTE
    model: str = ""  # only ever the served model's name: it becomes a label
    num_bytes: int = 0  # of its body
    status: int = 0
    code: str = ""
    stream: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    attempts: int = 0
    least_priority: int = 0  # that it may have: nobody waits for requests of batches
    admitted: bool = False
    leave_crowd: Callable[[], None] | None = None  # of those that wait, until it asks workers
    ignored: list[str] = field(default_factory=list)  # fields that changed nothing
    span: "Span | None" = None  # None: it is not traced
    error_form: ErrorForm = openai_error  # of the API that its path belongs to
    id_headers: tuple[bytes, ...] = (b"x-request-id",)  # that tell its id
    _charged: bool = False
    _charged_tokens: int = 0
    _last_token: float | None = None
    _outcome: Outcome | None = None

    @property
    def places(self) -> Places:
        """Places for its runs: those of its tenant."""
        return self.allowance.places if self.allowance is not None else Places()

    def ask_workers(self) -> None:
        """Note that it waits no more to ask workers; what they do with it is known of each of its runs."""
        if self.leave_crowd is not None:
            self.leave_crowd()
            self.leave_crowd = None

    def charge(self, allowance: TenantAllowance) -> None:
        """Charge the request to a tenant.

        Raises:
            TenantLimited: the tenant may have no further request now.
        """
        self.allowance = allowance
        allowance.admit()
        self._charged = True

    def charge_tokens(self, max_output: int) -> None:
        """Charge the prompt and up to so many tokens of output to the tenant, before any work.

        Raises:
            TenantLimited: the tenant may not have so many now.
        """
        if self.allowance is not None:
            count = self.prompt_tokens + max_output
            try:
                self.allowance.spend_tokens(count)
            except TenantLimited as error:
                metrics.rejections.labels(error.code).inc()
                self.prompt_tokens = 0  # only accepted prompts are counted
                raise
            self._charged_tokens = count

    def settle(self) -> None:
        """Correct the charge by the tokens used: none, if no worker got any work."""
        if self.allowance is not None and self._charged:
            self._charged = False
            used = self.prompt_tokens + self.completion_tokens if self.attempts else 0
            self.allowance.settle_tokens(self._charged_tokens, used)
            self.allowance.release()

    def note_tokens(self, count: int, each: int = 1) -> None:
        """Time tokens, or scores, by the first and the gaps; those that came together count as made at even gaps.

        Args:
            count: tokens of all answers.
            each: most of them of one answer.
        """
        now = time.monotonic()
        if self._last_token is None:
            series(metrics.ttft_s, self.route, self.model).observe(now - self.started)
        elif count:
            gaps = series(metrics.itl_s, self.route, self.model)
            for _ in range(each):
                gaps.observe((now - self._last_token) / each)
        self._last_token = now
        self.completion_tokens += count

    def refusal(self, problem: HttpProblem) -> Response:
        """Make the answer that tells a problem."""
        return self.error_form(problem, self.request_id)

    def fail(self, problem: HttpProblem) -> None:
        """Note the error that the request ends with."""
        self.status = self.status or problem.status
        self.code = problem.body.code or ""
        cancelled = problem.status == CLIENT_CLOSED
        self._outcome = self._outcome or ("cancelled" if cancelled else "errored")

    def close(self) -> None:
        """Log and count the request; called once, when nothing more is sent."""
        outcome: Outcome = self._outcome or ("done" if 0 < self.status < 400 else "errored")
        took_s = time.monotonic() - self.started
        by = self.route, self.model
        series(metrics.requests, *by, str(self.status), outcome).inc()
        series(metrics.e2e_s, *by).observe(took_s)
        if self.tenant:
            series(metrics.tenant_requests, self.tenant, outcome).inc()
            series(metrics.tenant_tokens, self.tenant, "prompt").inc(self.prompt_tokens)
            series(metrics.tenant_tokens, self.tenant, "output").inc(self.completion_tokens)
        if self.prompt_tokens:
            series(metrics.prompt_tokens, *by).inc(self.prompt_tokens)
            series(metrics.prompt_tokens_cached, *by).inc(self.cached_tokens)
            series(metrics.generation_tokens, *by).inc(self.completion_tokens)
        report = log.debug if self.route in PROBED else log.info
        report(
            "request.finished",
            request_id=self.request_id,
            method=self.method,
            tenant=self.tenant or None,
            route=self.route,
            status=self.status,
            outcome=outcome,
            code=self.code or None,
            stream=self.stream,
            took_s=round(took_s, 4),
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            completion_tokens=self.completion_tokens,
            attempts=self.attempts,
        )


class ClientClosed(MoesaicError):
    """The client closed the connection before the end of the answer."""

    code = "client_closed_request"
    http_status = CLIENT_CLOSED

    def __init__(self) -> None:
        super().__init__("the client closed the connection")


async def gone(receive: Receive) -> None:
    """Wait until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        continue


async def while_connected(
    receive: Receive, work: Coroutine[Any, Any, T], ended: Callable[[], bool] = lambda: False
) -> T:
    """Do the work unless the client disconnects first, which cancels it; a disconnect once it has ``ended`` does not.

    Raises:
        ClientClosed: the client disconnected.
    """
    loop, worker = asyncio.get_running_loop(), asyncio.current_task()
    # A coroutine always runs in a task.
    assert worker is not None
    leaving: asyncio.Task[None] | None = None
    left = over = False

    def watch() -> None:
        nonlocal leaving
        leaving = loop.create_task(gone(receive))
        leaving.add_done_callback(stop)

    def stop(leaving: "asyncio.Task[None]") -> None:
        nonlocal left
        if not (over or leaving.cancelled() or ended()):
            left = True
            worker.cancel()

    looking = loop.call_later(LOOK_AFTER_S, watch)
    try:
        return await work
    except asyncio.CancelledError:
        if left and worker.uncancel() == 0:
            raise ClientClosed from (leaving.exception() if leaving is not None else None)
        # Somebody else wants this task to end.
        raise
    finally:
        # It may have been seen in the same round of the loop.
        over = True
        looking.cancel()
        if leaving is not None:
            leaving.cancel()
