"""One gateway process, shared by all routes: the model's language, the workers, the requests in flight.

``admit`` checks what all routes check alike: the model, the limits of the tenant, and the room.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import structlog
from starlette.requests import Request

from moesaic.api_keys import DEFAULT_TENANT
from moesaic.errors import ModelNotFound, MoesaicError, NotReady, Overloaded
from moesaic.prefix.fleet import Room
from moesaic.services.gateway import metrics
from moesaic.services.gateway.access import Tenants
from moesaic.services.gateway.console.collector import Collector
from moesaic.services.gateway.fields.bodies import InferenceWire, RequestBody
from moesaic.services.gateway.fields.defaults import NO_DEFAULTS, read_defaults
from moesaic.services.gateway.files.shelf import Shelf
from moesaic.services.gateway.files.store import Store
from moesaic.services.gateway.http.problems import RouteNotEnabled
from moesaic.services.gateway.http.request_record import RequestRecord, is_request_id, route_of
from moesaic.services.gateway.http.turnstile import Lane, Turnstile
from moesaic.services.gateway.language import Language
from moesaic.services.gateway.readiness import Lacks, lacking_experts, lacks
from moesaic.services.gateway.settings import GatewaySettings
from moesaic.services.gateway.workers.execution import Execution, num_sent_at_first
from moesaic.services.gateway.workers.run import Deadline, RequestTerms, Run
from moesaic.services.gateway.workers.workers import Workers

MAX_DIGITS = 18  # of a time budget; a longer number is longer than any budget that counts
Body = TypeVar("Body", bound=InferenceWire)
BodyOf = TypeVar("BodyOf", bound=InferenceWire, covariant=True)


class Gateway:
    """One gateway process.

    Attributes:
        draining: admit nothing new.
        lacking_experts: failing checks of the expert workers; kept true from outside.
        inflight: the requests in flight, in the order in which they came; each with its runs, once there are any.
        other_protocol: why services of another protocol are not used, by worker id.
        idle: set while no request is in flight.
        defaults: the model's own, for fields that a request leaves out.
        store: of files, batches and responses; None where they are not kept.
        turnstile: that bodies pass one by one.
        lane: the thread that reads long bodies.
        console: collects what operators see; set once the gateway is in its cluster.
    """

    def __init__(self, settings: GatewaySettings, language: Language) -> None:
        self.settings, self.language = settings, language
        own = settings.generation_config == "auto"
        self.defaults = read_defaults(language.directory) if own else NO_DEFAULTS
        self.model_name = settings.name_in_api
        self.tenants = Tenants(settings.api_key.get_secret_value(), settings.api_keys_file)
        self.workers = Workers(language.config, settings)
        self.draining = False
        self.inflight: dict[RequestRecord, Sequence[Run]] = {}
        self.lacking_experts: Lacks = lacking_experts(None, {})
        self.other_protocol: dict[str, str] = {}
        self.idle = asyncio.Event()
        self.idle.set()
        self.created = int(time.time())
        self.store = _store(settings)
        self.turnstile, self.lane = Turnstile(), Lane()
        self.console: Collector | None = None
        self._executions: set[Execution] = set()

    @property
    def num_queued(self) -> int:
        """Number of sequences that wait for an attention worker."""
        return self.workers.routing.router.num_queued

    @property
    def collector(self) -> Collector:
        """The collector of what operators see.

        Raises:
            NotReady: the gateway is not in its cluster yet.
        """
        if self.console is None:
            raise NotReady("waiting for the cluster")
        return self.console

    @property
    def num_inflight(self) -> int:
        """Number of requests in flight."""
        return len(self.inflight)

    @property
    def max_tokens(self) -> int:
        """Most tokens of a request, prompt and answer together: the model's, as far as workers have room."""
        room = self.workers.max_request_tokens
        return min(room, self.language.max_tokens) if room else self.language.max_tokens

    @property
    def system_fingerprint(self) -> str:
        """Name of the configuration and weights of the workers that answer."""
        return f"fp_{self.workers.model_digest[:12]}"

    def failing_checks(self) -> Lacks:
        """Find what keeps requests from being answered; nothing when ready."""
        dispatches = [worker.record.dispatch for worker in self.workers.accepting]
        return lacks(self.draining, dispatches, self.lacking_experts)

    def check(self, record: RequestRecord, body: RequestBody) -> None:
        """Check what every body has in common.

        Raises:
            ModelNotFound: another model is asked for.
        """
        if body.model is not None and body.model != self.model_name:
            raise ModelNotFound(body.model[:200], self.model_name)
        record.model = self.model_name
        if isinstance(body, InferenceWire) and is_request_id(body.request_id):
            record.request_id = body.request_id
            structlog.contextvars.bind_contextvars(request_id=record.request_id)

    def enter(self, record: RequestRecord) -> None:
        """Count a request among those in flight, before it waits for anything; ``release`` ends that.

        Raises:
            Overloaded: too many requests are in flight, or wait for workers, and none waits for its turn that has
                to leave for one of this tenant.
        """
        self._check_room(record, 1)
        if self.num_inflight >= self.settings.max_inflight and not self.turnstile.give_way(
            record.tenant
        ):
            metrics.rejections.labels("max_inflight").inc()
            raise Overloaded(f"{self.num_inflight} requests are in flight")
        self.inflight[record] = ()
        self.idle.clear()
        record.admitted = True
        self._join_crowd(record, 1)

    def _check_room(self, record: RequestRecord, num_runs: int) -> None:
        router = self.workers.routing.router
        if not router.takes(record.tenant, record.least_priority, Room(num_runs, 0)):
            metrics.rejections.labels("workers_full").inc()
            raise router.refusal()

    def _join_crowd(self, record: RequestRecord, num_runs: int) -> None:
        """Count a request among those that wait for workers, until it asks them."""
        crowd = self.workers.routing.router.fleet.crowd
        crowd.join(record.tenant, record.least_priority, 0, num_runs)
        record.leave_crowd = partial(crowd.leave, record.tenant, record.least_priority, 0, num_runs)

    def admit(self, record: RequestRecord, num_runs: int) -> None:
        """Let a request go on that is in flight, before the prompts of its runs are made.

        Raises:
            NotReady, ExpertUnavailable: it could not be answered now.
            Overloaded: workers have no room for its runs.
        """
        for check, error in self.failing_checks().items():
            metrics.rejections.labels(check).inc()
            raise error
        if (num_first := num_sent_at_first(num_runs, record.places)) > 1:
            # It was counted as one.
            record.ask_workers()
            self._check_room(record, num_first)
            self._join_crowd(record, num_first)

    def release(self, record: RequestRecord) -> None:
        """Note the end of a request, in flight or not."""
        record.ask_workers()
        if record.admitted:
            record.admitted = False
            del self.inflight[record]
            if not self.inflight:
                self.idle.set()

    @asynccontextmanager
    async def execution(
        self, answer_id: str, runs: Sequence[Run], deadline: Deadline, record: RequestRecord
    ) -> AsyncIterator[Execution]:
        """Carry out the runs of one request; those still under way at the end are cancelled."""
        places, span = record.places, record.span
        async with Execution(self.workers, answer_id, runs, deadline, places, span) as execution:
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


def _store(settings: GatewaySettings) -> Store | None:
    if not settings.files_dir:
        return None
    keep_s = settings.files_keep_days * 86400
    return Store(Path(settings.files_dir), settings.files_quota_bytes, keep_s)


def gateway_of(request: Request) -> Gateway:
    """Find the gateway that serves a request."""
    gateway: Any = request.app.state.gateway
    # The app is made with one.
    assert isinstance(gateway, Gateway)
    return gateway


def store_of(request: Request) -> Store:
    """Find the store of files, batches and responses.

    Raises:
        RouteNotEnabled: there is none.
    """
    store = gateway_of(request).store
    if store is None:
        what = "files, batches and stored responses are disabled"
        raise RouteNotEnabled(f"{what}; start the gateway with --files-dir")
    return store


def shelf_of(request: Request) -> Shelf:
    """Find the shelf of the tenant that calls.

    Raises:
        RouteNotEnabled: nothing is kept.
    """
    return store_of(request).of(record_of(request).tenant)


def record_of(request: Request) -> RequestRecord:
    """Find the record of a request."""
    record: Any = request.scope["state"]["record"]
    # ``Entry`` makes one
    assert isinstance(record, RequestRecord)
    record.route = route_of(request.scope)
    return record


@dataclass(frozen=True)
class Admitted(Generic[BodyOf]):
    """One inference request that counts among those in flight until ``Gateway.release``."""

    gateway: Gateway
    record: RequestRecord
    body: BodyOf
    answer_id: str  # such as ``chatcmpl-…``
    created: int  # seconds since 1970
    deadline: Deadline
    site: str  # of the caller; empty: any

    @property
    def terms(self) -> RequestTerms:
        """Treatment of the request beside others: what the caller asks for, within its tenant's bounds."""
        body, tenant = self.body, self.record.tenant
        return RequestTerms(
            priority=body.moesaic.priority if body.priority is None else body.priority,
            tenant=tenant,
            cache_salt=_salt(tenant, body.cache_salt or ""),
            min_threshold=body.moesaic.least_threshold,
            store_kv=body.moesaic.store_kv,
            site=self.site,
        )

    def execution(self, runs: Sequence[Run]) -> AbstractAsyncContextManager[Execution]:
        """Carry out the runs; those still under way at the end of the block are cancelled."""
        self.record.ask_workers()
        if self.record in self.gateway.inflight:
            self.gateway.inflight[self.record] = runs
        # Workers know it by this name.
        structlog.contextvars.bind_contextvars(answer_id=self.answer_id)
        return self.gateway.execution(self.answer_id, runs, self.deadline, self.record)


def admit(
    request: Request, body: Body, kind: str, refusal: MoesaicError | None = None
) -> Admitted[Body]:
    """Check a body and admit its request; nothing has been computed for it before.

    Args:
        request: the HTTP request.
        body: its decoded body.
        kind: the beginning of the answer's id.
        refusal: the route's own objection to the body, raised once the common checks have passed.

    Raises:
        ModelNotFound: the body asks for another model.
        NotReady, ExpertUnavailable: the suite cannot answer now.
        Overloaded: workers have no room for what the body asks for.
    """
    gateway, record = gateway_of(request), record_of(request)
    gateway.check(record, body)
    if refusal is not None:
        raise refusal
    gateway.admit(record, body.num_runs)
    deadline = _deadline(request, body, gateway.settings.request_timeout_s)
    answer_id = f"{kind}-{secrets.token_hex(12)}"
    header = request.headers.get("x-moesaic-site", "")
    site = body.moesaic.site or header or gateway.settings.site
    return Admitted(gateway, record, body, answer_id, int(time.time()), deadline, site)


def _deadline(request: Request, body: InferenceWire, most_s: float) -> Deadline:
    """Count the least of all budgets from now on: the settings', the body's, the header's."""
    budgets_ms: list[float] = [most_s * 1000]
    if body.moesaic.deadline_ms is not None:
        budgets_ms.append(body.moesaic.deadline_ms)
    header = request.headers.get("x-request-timeout-ms", "")
    if header.isdecimal() and (budget_ms := int(header[:MAX_DIGITS])) > 0:
        budgets_ms.append(budget_ms)
    return Deadline.after(min(budgets_ms))


def _salt(tenant: str, salt: str) -> str:
    """Part tenants from each other, whatever salts they choose: neither names nor salts have a NUL."""
    return salt if tenant == DEFAULT_TENANT else f"\0{tenant}\0{salt}"
