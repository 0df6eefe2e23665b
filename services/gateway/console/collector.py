"""Collects the state of the cluster while somebody looks at it, and asks nobody otherwise."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from moesaic.cluster.background import again_and_again
from moesaic.cluster.placement_view import PlacementView
from moesaic.cluster.waiting import Changes
from moesaic.errors import MoesaicError, NotReady
from moesaic.messages.registry import WorkerRecord
from moesaic.services.gateway.access import TenantLimited
from moesaic.services.gateway.console.asking import Asking
from moesaic.services.gateway.console.experts import (
    NOTHING_HELD,
    HeldExperts,
    expert_map,
    held_by_workers,
    shares_of_workers,
)
from moesaic.services.gateway.console.inflight import requests_of
from moesaic.services.gateway.console.latencies import TrafficWindow
from moesaic.services.gateway.console.state import (
    ClusterState,
    ExpertMap,
    LinkState,
    ServiceState,
    SiteState,
)
from moesaic.services.gateway.http.request_record import RequestRecord
from moesaic.services.gateway.workers.run import Run
from moesaic.v1.edge_agent_pb2 import GetProfileResponse

EVERY_S = 2.0
MOST_WATCHING = 64  # pages and other callers of one tenant at a time


class Gatewayed(Protocol):
    """The part of ``Gateway`` that is shown."""

    model_name: str
    inflight: dict[RequestRecord, Sequence[Run]]

    def failing_checks(self) -> dict[str, MoesaicError]:
        """Find what keeps requests from being answered."""
        ...

    @property
    def num_queued(self) -> int:
        """Number of sequences that wait for an attention worker."""
        ...


class Members(Protocol):
    """The part of ``Fleet`` that is needed."""

    workers: dict[str, WorkerRecord]


class Collector(Changes):
    """The state of a cluster, as one gateway sees it.

    Attributes:
        ended: the gateway stops; nobody may watch any more.
    """

    def __init__(
        self, name: str, gateway: Gatewayed, fleet: Members, placement: PlacementView
    ) -> None:
        """
        Args:
            name: worker id of the gateway.
            gateway: the gateway.
            fleet: registered processes.
            placement: the committed placement.
        """
        super().__init__()
        self._name, self._gateway, self._fleet, self._placement = name, gateway, fleet, placement
        self._asking, self._traffic = Asking(), TrafficWindow()
        self.ended = False
        self._watching: Counter[str] = Counter()
        self._collecting: asyncio.Task[None] | None = None
        self._state: ClusterState | None = None
        # Of these placement and traffic.
        self._known: tuple[object, object] = None, None
        self._holding: tuple[dict[str, HeldExperts], dict[str, float]] | None = None

    @asynccontextmanager
    async def watching(self, tenant: str) -> AsyncIterator["Collector"]:
        """Collect for the length of the block; several blocks share one collection.

        Raises:
            NotReady: the gateway stops.
            TenantLimited: the tenant watches often enough.
        """
        self._check_end()
        if self._watching[tenant] >= MOST_WATCHING:
            what = f"this key watches {MOST_WATCHING} times; close pages of the console"
            raise TenantLimited("tenant_concurrency_exceeded", what, EVERY_S)
        self._watching[tenant] += 1
        if self._collecting is None:
            self._collecting = asyncio.create_task(again_and_again(self._collect, "console"))
        try:
            yield self
        finally:
            self._watching[tenant] -= 1
            if not self._watching.total():
                await self._stop()

    def end(self) -> None:
        """Have everybody watch no more: the gateway stops."""
        self.ended = True
        self.note_change()

    def _check_end(self) -> None:
        if self.ended:
            raise NotReady("the gateway is stopping", code="draining")

    @property
    def collects(self) -> bool:
        """True while somebody watches."""
        return self._collecting is not None

    async def state(self) -> ClusterState:
        """Give the newest state; waits for the first.

        Raises:
            NotReady: the gateway stops before that.
        """
        while self._state is None:
            self._check_end()
            await self.changed(self.version)
        return self._state

    def experts(self) -> ExpertMap:
        """Give the experts' holders and loads."""
        return expert_map(self._placement.current, self._asking.activations)

    async def _stop(self) -> None:
        collecting, self._collecting, self._state = self._collecting, None, None
        # Before this waits: the next one who watches begins anew.
        asking, self._asking, self._traffic = self._asking, Asking(), TrafficWindow()
        assert collecting is not None
        collecting.cancel()
        await asyncio.gather(collecting, return_exceptions=True)
        await asking.close()

    async def _collect(self) -> None:
        while True:
            await self._asking.ask(list(self._fleet.workers.values()))
            self._state = self._make()
            self.note_change()
            await asyncio.sleep(EVERY_S)

    def _make(self) -> ClusterState:
        gateway, told = self._gateway, self._asking
        records = sorted(self._fleet.workers.values(), key=lambda record: record.worker_id)
        failing = gateway.failing_checks()
        return ClusterState(
            at=time.time(),
            model=gateway.model_name,
            ready=not failing,
            waiting_for=[str(error) for error in failing.values()],
            epoch=self._placement.epoch,
            gateway=self._name,
            traffic=self._traffic.look(len(gateway.inflight), gateway.num_queued),
            services=self._services(records),
            links=list(_links_of_sites(told.profiles)),
            sites=[_site(name, found) for name, found in sorted(told.profiles.items())],
            requests=requests_of(gateway.inflight),
            brownout=told.brownout,
            scaling=told.scaling,
            decisions=told.decisions,
        )

    def _held(self) -> tuple[dict[str, HeldExperts], dict[str, float]]:
        """Find the experts and the share of rows of each worker, anew when placement or traffic changes."""
        known, self._known = self._known, (self._placement.current, self._asking.activations)
        if known != self._known or self._holding is None:
            self._holding = (
                held_by_workers(self._placement.current),
                shares_of_workers(self.experts()),
            )
        return self._holding

    def _services(self, records: Iterable[WorkerRecord]) -> list[ServiceState]:
        held, shares = self._held()
        return [
            ServiceState(
                id=record.worker_id,
                role=record.role,
                state=record.state,
                node=record.node,
                site=record.site,
                version=record.version,
                generation=record.generation,
                experts=held.get(record.worker_id, NOTHING_HELD).replicas,
                layers=held.get(record.worker_id, NOTHING_HELD).layers,
                expert_share=shares.get(record.worker_id),
                layer_bytes_per_s=self._sent(record),
                load=self._asking.loads.get(record.incarnation),
            )
            for record in records
        ]

    def _sent(self, record: WorkerRecord) -> float | None:
        """Bytes that a worker sends in a second for each layer to each worker with experts of it."""
        load = self._asking.loads.get(record.incarnation)
        if record.dispatch != "routed" or load is None or load.rows_per_s is None:
            return None
        return round(load.rows_per_s * record.row_bytes, 1)


def _links_of_sites(
    profiles: dict[str, GetProfileResponse],
) -> Iterable[LinkState]:
    for name, found in sorted(profiles.items()):
        for link in found.links:
            yield LinkState(
                source=name,
                target=link.peer,
                rtt_s=link.rtt_s or None,
                bytes_per_s=link.bytes_per_s or None,
            )


def _site(name: str, found: GetProfileResponse) -> SiteState:
    choices = found.local + found.cached + found.loaded + found.remote
    return SiteState(
        id=name,
        site=found.site,
        memory_used_bytes=found.memory_used_bytes,
        memory_limit_bytes=found.memory_limit_bytes,
        held=found.num_held,
        local_share=round(found.local / choices, 4) if choices else None,
    )
