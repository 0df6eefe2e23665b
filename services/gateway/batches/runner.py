"""Carrying out batches: those that no other process does, a few at a time, tenants in turn."""

import asyncio
import contextlib
from collections import Counter
from contextlib import ExitStack

import msgspec
import structlog
from starlette.types import ASGIApp

from moesaic.batch.requests import BatchRequest
from moesaic.batch.results import Result, RouteAnswer, answered, unanswered
from moesaic.batch.retries import BUSY_STATUSES, retry_wait_s
from moesaic.services.gateway.access import Tenant
from moesaic.services.gateway.batches.carry import Carrier
from moesaic.services.gateway.batches.within import InnerAnswer, after_others, post_within
from moesaic.services.gateway.files.disk import NoSuch, StorageUnavailable, on_disk
from moesaic.services.gateway.files.store import Store, Unfinished
from moesaic.services.gateway.gateway import Gateway

log = structlog.get_logger()

MAX_RUNNING = 8  # batches at once in this process
MAX_TENANTS = 64  # up to here, a tenant that has none under way may have one even so
LOOK_EVERY_S = 1.0  # for batches of gateways that are gone
SWEEP_EVERY_S = 600.0
REST_S = 10.0  # before a batch that was interrupted is gone on with
MAX_FAILURES = 4  # of one request, while workers did work on it
LINE_OVERHEAD_BYTES = 4096  # of a line around the body that the route may get


class BatchRunner:
    """The part of a gateway that carries batches out.

    Args:
        gateway: its readiness and its tenants count.
        app: the gateway's whole application.
        store: of the batches.
    """

    def __init__(self, gateway: Gateway, app: ASGIApp, store: Store) -> None:
        self._gateway, self._app, self._store = gateway, app, store
        self._inflight = asyncio.Semaphore(gateway.settings.batch_max_inflight)
        self._running: dict[Unfinished, asyncio.Task[None]] = {}
        self._resting: dict[Unfinished, float] = {}  # until when

    async def run(self) -> None:
        """Carry batches out until cancelled; the next process goes on with those that are unfinished then."""
        loop = asyncio.get_running_loop()
        next_sweep = loop.time()
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._store.added.clear()
                try:
                    if loop.time() >= next_sweep:
                        next_sweep = loop.time() + SWEEP_EVERY_S
                        await on_disk(self._store.sweep)
                    await self._start_some(tasks)
                except Exception as error:  # of any kind: the gateway itself goes on
                    if not isinstance(error, StorageUnavailable):
                        log.exception("batches.failed")
                    await asyncio.sleep(REST_S)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_EVERY_S):
                        await self._store.added.wait()

    async def _start_some(self, tasks: asyncio.TaskGroup) -> None:
        now = asyncio.get_running_loop().time()
        unfinished = await on_disk(self._store.unfinished)
        self._resting = {b: until for b, until in self._resting.items() if until > now}
        idle = [b for b in unfinished if b not in self._running and b not in self._resting]
        while idle:
            busy = Counter(batch.tenant for batch in self._running)
            idle.sort(key=lambda batch: (busy[batch.tenant], batch.batch_id))
            batch = idle.pop(0)
            if len(self._running) >= (MAX_RUNNING if busy[batch.tenant] else MAX_TENANTS):
                break
            claim = ExitStack()
            if await on_disk(lambda: claim.enter_context(self._store.claimed(batch))):  # noqa: B023  # called before the next turn
                self._running[batch] = tasks.create_task(self._carry(batch, claim))
            else:
                claim.close()

    async def _carry(self, batch: Unfinished, claim: ExitStack) -> None:
        with claim:
            try:
                if await self._has_ended(batch):
                    await on_disk(lambda: self._store.settle(batch))
                    return
            except Exception:
                log.exception("batch.interrupted", batch_id=batch.batch_id)
            finally:
                del self._running[batch]
                # There may be another one to start now.
                self._store.added.set()
            self._resting[batch] = asyncio.get_running_loop().time() + REST_S

    async def _has_ended(self, batch: Unfinished) -> bool:
        """Carry a batch out.

        Returns:
            False if it is not there yet.
        """
        shelf = self._store.of(batch.tenant)
        try:
            record = await on_disk(lambda: shelf.record(batch.batch_id))
        except NoSuch:
            return await on_disk(lambda: self._store.is_orphan(batch))

        async def ask(request: BatchRequest) -> Result:
            return await self._ask(batch, request)

        max_line_bytes = self._gateway.settings.max_body_bytes + LINE_OVERHEAD_BYTES
        max_inflight = self._max_inflight(batch.tenant)
        await Carrier(shelf, record, ask, max_line_bytes, max_inflight).to_the_end()
        return True

    def _max_inflight(self, name: str) -> int:
        """Bound a batch's requests at once; more than its tenant may have would only be refused, again and again."""
        most = self._gateway.settings.batch_max_inflight
        tenant = self._gateway.tenants.for_batches(name)
        if tenant is None or tenant.entry is None or tenant.entry.max_concurrent is None:
            return most
        return min(most, tenant.entry.max_concurrent)

    async def _ask(self, batch: Unfinished, request: BatchRequest) -> Result:
        """Answer one request, however long it takes until the suite can."""
        request_id = f"{batch.batch_id}-{request.number}"
        try:
            body = after_others(request.body)
        except RecursionError:
            return unanswered(request.custom_id, "invalid_body", "it is nested too deeply")
        num_tries = num_failures = 0
        while True:
            tenant = await self._ready(batch.tenant)
            async with self._inflight:
                answer = await post_within(self._app, tenant, request.url, body, request_id)
            num_tries += 1
            asked = answer.headers.get("retry-after"), answer.headers.get("x-should-retry")
            wait_s = retry_wait_s(num_tries, answer.status, *asked)
            content = await asyncio.to_thread(msgspec.json.decode, answer.body)
            num_failures += _is_failure(answer, content)
            if wait_s is None or num_failures == MAX_FAILURES:
                request_id = answer.headers.get("x-request-id", request_id)
                return answered(request.custom_id, RouteAnswer(answer.status, request_id, content))
            await asyncio.sleep(wait_s)

    async def _ready(self, name: str) -> Tenant:
        """Wait until requests can be answered, and the tenant may make some."""
        while True:
            tenant = self._gateway.tenants.for_batches(name)
            if tenant is not None and not self._gateway.failing_checks():
                return tenant
            await asyncio.sleep(LOOK_EVERY_S)


def _is_failure(answer: InnerAnswer, content: object) -> bool:
    """Tell failures at a worker from refusals: a request that fails again and again is given up."""
    if answer.status not in BUSY_STATUSES:
        return answer.status >= 500
    error = content.get("error") if isinstance(content, dict) else None
    if not isinstance(error, dict):
        return False
    # Anthropic's errors have it among their details.
    details = error.get("details")
    code = details.get("error_code") if isinstance(details, dict) else error.get("code")
    return bool(code == "worker_lost")
