"""One HTTP request from its first byte to its last: what is logged and counted of it, once."""

import re
import time
from dataclasses import dataclass, field
from typing import Literal, TypeGuard

import structlog
from starlette.types import Scope

from moesaic.telemetry.metrics import series
from services.gateway import metrics
from services.gateway.limits import Allowance, TenantLimited
from services.gateway.problems import Problem
from services.gateway.scopes import PROBED

log = structlog.get_logger()

Outcome = Literal["done", "errored", "cancelled"]
CLIENT_CLOSED = 499
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


def is_request_id(value: str | None) -> TypeGuard[str]:
    """Whether a caller's own request id can be taken over."""
    return value is not None and _REQUEST_ID.fullmatch(value) is not None


def route_of(scope: Scope) -> str:
    """The template of the route that matched: a closed set, unlike paths."""
    return str(getattr(scope.get("route"), "path", "other"))


@dataclass(eq=False)
class Exchange:
    """Filled in by whoever handles the request."""

    request_id: str
    method: str
    tenant: str = ""  # whose request it is; empty while that is not known, and where nobody asks
    allowance: Allowance | None = None  # what it is charged to; None: no limits
    started: float = field(default_factory=time.monotonic)
    route: str = "other"
    model: str = ""  # only ever the served model's name: it becomes a label
    status: int = 0
    code: str = ""
    stream: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    attempts: int = 0
    admitted: bool = False
    ignored: list[str] = field(default_factory=list)  # fields that changed nothing
    _entered: bool = False
    _taken_tokens: int = 0
    _last_token: float | None = None
    _outcome: Outcome | None = None

    def enter(self, allowance: Allowance) -> None:
        """Charge the request to a tenant.

        Raises:
            TenantLimited: the tenant may have no further one now.
        """
        self.allowance = allowance
        allowance.enter()
        self._entered = True

    def take_tokens(self, max_output: int) -> None:
        """Charge the prompt and up to so many tokens of output to the tenant, before any work.

        Raises:
            TenantLimited: that many are not there now.
        """
        if self.allowance is not None:
            count = self.prompt_tokens + max_output
            try:
                self.allowance.take_tokens(count)
            except TenantLimited as error:
                metrics.rejections.labels(error.code).inc()
                self.prompt_tokens = 0  # only accepted prompts are counted
                raise
            self._taken_tokens = count

    def leave(self) -> None:
        """Charge what was used instead of what was taken: nothing, if no worker got any work."""
        if self.allowance is not None and self._entered:
            self._entered = False
            used = self.prompt_tokens + self.completion_tokens if self.attempts else 0
            self.allowance.settle_tokens(self._taken_tokens, used)
            self.allowance.leave()

    def note_tokens(self, count: int, each: int = 1) -> None:
        """Tokens, or scores, were made, up to ``each`` of one answer: times the first and the gaps. What came
        together counts as made at even gaps."""
        now = time.monotonic()
        if self._last_token is None:
            series(metrics.ttft_s, self.route, self.model).observe(now - self.started)
        elif count:
            gaps = series(metrics.itl_s, self.route, self.model)
            for _ in range(each):
                gaps.observe((now - self._last_token) / each)
        self._last_token = now
        self.completion_tokens += count

    def fail(self, problem: Problem) -> None:
        """It ends with this error."""
        self.status = self.status or problem.status
        self.code = problem.body.code or ""
        cancelled = problem.status == CLIENT_CLOSED
        self._outcome = self._outcome or ("cancelled" if cancelled else "errored")

    def close(self) -> None:
        """The one place where a request is logged and counted; called once, when nothing more is sent."""
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
