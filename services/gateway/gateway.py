"""What the routes share: the model's language, the workers, and who is let in."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from starlette.requests import Request

from moesaic.api_keys import DEFAULT_TENANT
from moesaic.errors import ModelNotFound, NotReady, Overloaded
from services.gateway import metrics
from services.gateway.batches.shelf import Shelf
from services.gateway.batches.store import Store
from services.gateway.exchange import Exchange, is_request_id, route_of
from services.gateway.execution import Deadline, Execution, Run, Terms
from services.gateway.fields import InferenceWire, Wire
from services.gateway.language import Language
from services.gateway.problems import RouteNotEnabled
from services.gateway.readiness import Lacks, lacking_experts, lacks
from services.gateway.settings import GatewaySettings
from services.gateway.tenants import Tenants
from services.gateway.unsupported import check_extras
from services.gateway.workers import Workers

MAX_DIGITS = 18  # of a time budget; what has more is longer than any that counts


class Gateway:
    """One gateway process.

    Attributes:
        draining: take nothing new.
        lacking_experts: what the cluster lacks to serve every expert; kept true from outside.
        idle: set while no request is in the house.
        store: of files and batches; None where they are not kept.
    """

    def __init__(self, settings: GatewaySettings, language: Language) -> None:
        self.settings, self.language = settings, language
        self.model_name = settings.name_in_api
        self.tenants = Tenants(settings.api_key.get_secret_value(), settings.api_keys_file)
        self.workers = Workers(language.config, settings)
        self.draining = False
        self.num_inflight = 0
        self.lacking_experts: Lacks = lacking_experts(None, {})
        self.idle = asyncio.Event()
        self.idle.set()
        self.created = int(time.time())
        self.store = _store(settings)
        self._executions: set[Execution] = set()

    @property
    def max_tokens(self) -> int:
        """Tokens that a request may have, prompt and answer together: the model's, as far as workers have room."""
        room = self.workers.max_request_tokens
        return min(room, self.language.max_tokens) if room else self.language.max_tokens

    @property
    def system_fingerprint(self) -> str:
        """Names configuration and weights of the workers that answer."""
        return f"fp_{self.workers.model_digest[:12]}"

    def failing_checks(self) -> Lacks:
        """What keeps requests from being answered; empty when ready."""
        dispatches = [worker.record.dispatch for worker in self.workers.accepting]
        return lacks(self.draining, dispatches, self.lacking_experts)

    def check(self, exchange: Exchange, body: Wire) -> None:
        """Check what every body has in common.

        Raises:
            ModelNotFound: another model is asked for.
            InvalidInput: a field cannot be honoured.
        """
        if body.model is not None and body.model != self.model_name:
            raise ModelNotFound(body.model[:200], self.model_name)
        exchange.model = self.model_name
        exchange.ignored = check_extras(body)
        if isinstance(body, InferenceWire) and is_request_id(body.request_id):
            exchange.request_id = body.request_id

    def admit(self, exchange: Exchange) -> None:
        """Let a request in; ``release`` lets it out again.

        Raises:
            NotReady, ExpertUnavailable: it could not be answered now.
            Overloaded: there are too many already.
        """
        for check, error in self.failing_checks().items():
            metrics.rejections.labels(check).inc()
            raise error
        if self.num_inflight >= self.settings.max_inflight:
            metrics.rejections.labels("max_inflight").inc()
            raise Overloaded(f"{self.num_inflight} requests are in the house")
        self.num_inflight += 1
        self.idle.clear()
        exchange.admitted = True

    def release(self, exchange: Exchange) -> None:
        """A request is over, admitted or not."""
        if exchange.admitted:
            exchange.admitted = False
            self.num_inflight -= 1
            if not self.num_inflight:
                self.idle.set()

    def deadline(self, request: Request, body: InferenceWire) -> Deadline:
        """The least of what the caller and the settings allow, from now on."""
        budgets_ms: list[float] = [self.settings.request_timeout_s * 1000]
        if body.moesaic.deadline_ms is not None:
            budgets_ms.append(body.moesaic.deadline_ms)
        header = request.headers.get("x-request-timeout-ms", "")
        if header.isdecimal() and (budget_ms := int(header[:MAX_DIGITS])) > 0:
            budgets_ms.append(budget_ms)
        return Deadline.after(min(budgets_ms))

    @asynccontextmanager
    async def execution(
        self, answer_id: str, runs: Sequence[Run], deadline: Deadline, exchange: Exchange
    ) -> AsyncIterator[Execution]:
        """Carry out the runs of one request; those still under way at the end are cancelled."""
        places = exchange.allowance.places if exchange.allowance else None
        async with Execution(self.workers, answer_id, runs, deadline, places) as execution:
            self._executions.add(execution)
            try:
                yield execution
            finally:
                self._executions.discard(execution)

    def abort_all(self) -> None:
        """End every running request with an error that says that a retry helps."""
        error = NotReady("the gateway is stopping", code="draining")
        for execution in self._executions:
            execution.abort(error)


def terms_of(body: InferenceWire, tenant: str) -> Terms:
    """How the request is to be treated beside others, as its caller wants it and as its tenant must have it."""
    return Terms(
        priority=body.moesaic.priority if body.priority is None else body.priority,
        tenant=tenant,
        cache_salt=_salt(tenant, body.cache_salt or ""),
        exact=body.moesaic.quality == "exact",
        store_kv=body.moesaic.store_kv,
    )


def _salt(tenant: str, salt: str) -> str:
    """Parts tenants from each other, whatever salts they choose: neither names nor salts have a NUL."""
    return salt if tenant == DEFAULT_TENANT else f"\0{tenant}\0{salt}"


def _store(settings: GatewaySettings) -> Store | None:
    if not settings.files_dir:
        return None
    keep_s = settings.files_keep_days * 86400
    return Store(Path(settings.files_dir), settings.files_quota_bytes, keep_s)


def gateway_of(request: Request) -> Gateway:
    """The gateway that serves a request."""
    gateway: Any = request.app.state.gateway
    assert isinstance(gateway, Gateway)  # the app is made with one
    return gateway


def store_of(request: Request) -> Store:
    """Where files and batches are kept.

    Raises:
        RouteNotEnabled: they are not kept here.
    """
    store = gateway_of(request).store
    if store is None:
        raise RouteNotEnabled("files and batches are off: the gateway needs a --files-dir")
    return store


def shelf_of(request: Request) -> Shelf:
    """What is kept for the tenant that calls.

    Raises:
        RouteNotEnabled: nothing is.
    """
    return store_of(request).of(exchange_of(request).tenant)


def exchange_of(request: Request) -> Exchange:
    """The exchange that a request is."""
    exchange: Any = request.scope["state"]["exchange"]
    assert isinstance(exchange, Exchange)  # the outermost layer makes one
    exchange.route = route_of(request.scope)
    return exchange
