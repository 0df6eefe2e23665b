"""Admission: the one way from an inference route to a request that may be computed."""

import secrets
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Generic, TypeVar

from starlette.requests import Request

from moesaic.api_keys import DEFAULT_TENANT
from moesaic.errors import MoesaicError
from moesaic.services.gateway.fields.bodies import InferenceWire
from moesaic.services.gateway.gateway import Gateway, gateway_of, record_of
from moesaic.services.gateway.http.request_record import RequestRecord
from moesaic.services.gateway.workers.execution import Execution
from moesaic.services.gateway.workers.run import Deadline, RequestTerms, Run

MAX_DIGITS = 18  # of a time budget; a longer number is longer than any budget that counts
Body = TypeVar("Body", bound=InferenceWire)
BodyOf = TypeVar("BodyOf", bound=InferenceWire, covariant=True)


@dataclass(frozen=True)
class Admitted(Generic[BodyOf]):
    """One inference request that counts among those in the house until ``Gateway.release``."""

    gateway: Gateway
    record: RequestRecord
    body: BodyOf
    answer_id: str  # such as ``chatcmpl-…``
    created: int  # seconds since 1970
    deadline: Deadline
    site: str  # of the caller; empty: any

    @property
    def terms(self) -> RequestTerms:
        """Treatment of the request beside others: the caller's wishes, within its tenant's bounds."""
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
        return self.gateway.execution(self.answer_id, runs, self.deadline, self.record.places)


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
