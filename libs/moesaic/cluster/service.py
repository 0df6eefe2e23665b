"""The preamble of every service, from its name to its place in the registry.

Parts start in this order and stop in the other::

    introduce        its worker id, and its logs
    stop_event       (lifecycle) SIGTERM and SIGINT
    listening        its traces, its own addresses, its gRPC server
    joined           its metrics, Redis, its generation
    registered       its lease

``service`` is ``listening`` and ``joined``; only the gateway has something between them.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import grpc

import moesaic
from moesaic.cluster.background import tended
from moesaic.cluster.lifecycle import StopEvent
from moesaic.cluster.own_addresses import own_addresses
from moesaic.cluster.redis.bus import Bus
from moesaic.cluster.registry import Lease, next_generation, registered
from moesaic.cluster.rpc.server import AdminServer, ServiceStatus, admin_server
from moesaic.cluster.same_weights import same_weights
from moesaic.messages.registry import Role, Weights, WorkerRecord, WorkerState
from moesaic.messages.wire import PROTOCOL
from moesaic.settings import ServiceSettings
from moesaic.telemetry import spans
from moesaic.telemetry.logs import configure_logging
from moesaic.telemetry.metrics import serve_metrics

Settings = TypeVar("Settings", bound=ServiceSettings)
T = TypeVar("T")
_LOOK_S = 0.1  # how often a worker that stands by sees whether its work has ended
Register = Callable[[grpc.aio.Server], None]  # adds the service's own calls to its gRPC server


@dataclass(frozen=True)
class Identity:
    """The name of a process in its cluster."""

    role: Role
    worker_id: str


def introduce(settings: ServiceSettings, role: Role) -> Identity:
    """Give this process its name, and send its logs out under it."""
    worker_id = settings.identity(role)
    configure_logging(role, worker_id, settings.log_level)
    return Identity(role, worker_id)


@dataclass(frozen=True)
class ListeningProcess(Generic[Settings]):
    """A process that answers its operators.

    Attributes:
        settings: settings with the worker id, and with addresses of this machine for names.
        identity: name of the process.
        stop: set once the process shall stop.
        admin: its gRPC server.
    """

    settings: Settings
    identity: Identity
    stop: StopEvent
    admin: AdminServer

    @property
    def status(self) -> ServiceStatus:
        """The state that operators are shown."""
        return self.admin.status


@dataclass(frozen=True)
class Process(ListeningProcess[Settings]):
    """A process that has joined its cluster.

    Attributes:
        bus: bus on the cluster's Redis.
        generation: a number that grows with every start of this worker id.
        parts: closed in reverse order, before the process leaves the cluster.
    """

    bus: Bus
    generation: int
    parts: AsyncExitStack

    async def enter(self, part: AbstractAsyncContextManager[T]) -> T:
        """Open ``part`` until the process ends."""
        return await self.parts.enter_async_context(part)

    async def registered(self, state: WorkerState, **fields: Any) -> Lease:
        """Take a lease until the process ends.

        Args:
            state: state at the start.
            fields: fields of the ``WorkerRecord`` beside those that every process has.
        """
        record = WorkerRecord(
            worker_id=self.identity.worker_id,
            generation=self.generation,
            role=self.identity.role,
            state=state,
            admin_address=self.admin.address,
            metrics_address=self.status.metrics_address,
            node=self.settings.node_name,
            pid=os.getpid(),
            version=moesaic.__version__,
            protocol=PROTOCOL,
            **fields,
        )
        return await self.enter(registered(self.bus, record))

    async def agree_on_weights(self, weights: Weights) -> None:
        """Wait until the cluster has these weights or none, and hold them until the process ends."""
        self.status.dtype, self.status.quantization = weights.dtype, weights.quantization
        await self.enter(same_weights(self.bus, weights, self.status.waiting_for))


class Availability:
    """The state of a worker that takes work, shown alike by its lease and by its gRPC server."""

    def __init__(
        self,
        process: Process[Any],
        lease: Lease,
        drained: Callable[[bool], None] = lambda on: None,
        idle: Callable[[], Awaitable[bool]] | None = None,
    ) -> None:
        """Show the state of ``process``.

        Args:
            process: process of the worker.
            lease: lease of the process.
            drained: called first when the worker is told to take no more work, or to take it again.
            idle: tells if all work has ended; workers without it cannot stand by.
        """
        self._process, self._lease, self._drained, self._idle = process, lease, drained, idle

    async def begin(self, *, standby: bool = False) -> None:
        """Take work, unless operators drained the worker while it started, or it begins on standby."""
        process, status = self._process, self._process.status
        process.admin.on_drain(self._on_drain)
        process.admin.on_stand_by(self._show)
        if standby:
            status.stand_by(True)
        if status.drained or status.standing_by:
            # operators' call came before anybody heard of it here.
            self._drained(True)
        status.set_state("ready")
        await self._update()
        if self._idle is not None:
            await process.enter(tended(partial(self._come_to_rest, self._idle), "standby"))

    async def ended(self) -> None:
        """Wait until the process shall stop, and take no more work from then on."""
        await self._process.stop.wait()
        self._process.status.set_state("draining")
        await self._show()

    async def _on_drain(self, on: bool) -> None:
        await self._show()

    async def _show(self) -> None:
        self._drained(self._process.status.state != "ready")
        await self._update()

    async def _update(self) -> None:
        status = self._process.status
        await self._lease.update(
            state=status.state, standing_by=status.standing_by, drained=status.drained
        )

    async def _come_to_rest(self, idle: Callable[[], Awaitable[bool]]) -> None:
        """Move a worker that stands by from draining to standby, and back if it is given work after all."""
        status = self._process.status
        while True:
            if status.standing_by:
                status.rest(await idle())
                await self._update()
            await asyncio.sleep(_LOOK_S)


@asynccontextmanager
async def traced(settings: ServiceSettings, identity: Identity) -> AsyncIterator[None]:
    """Have the spans of this process sent for the length of the block, if the settings say where to.

    Raises:
        InvalidInput: they cannot be sent.
    """
    share = settings.trace_share if "trace_share" in settings.model_fields_set else None
    # Placements are few, and steps of any request may be linked to them.
    if share is not None and identity.role == "scheduler":
        share = 1.0
    described = {
        "service.name": f"moesaic-{identity.role}",
        "service.namespace": settings.cluster,
        "service.instance.id": identity.worker_id,
        "service.version": moesaic.__version__,
    }
    # An expert worker knows steps, not requests; those that ask it make the spans.
    endpoint = "" if identity.role == "expert" else settings.otlp_endpoint
    with spans.sent(endpoint, share, described):
        yield


@asynccontextmanager
async def listening(
    settings: Settings, identity: Identity, register: Register, stop: StopEvent
) -> AsyncIterator[ListeningProcess[Settings]]:
    """Answer operators for the length of the block.

    Args:
        settings: settings as they were given.
        identity: result of ``introduce``.
        register: adds the service's own calls.
        stop: stop event, already entered, so that it can end the start of these parts too.

    Raises:
        InUse: an address cannot be listened on.
        InvalidInput: a certificate cannot be read.
    """
    worker_id = identity.worker_id
    async with (
        traced(settings, identity),
        own_addresses(settings) as found,
        admin_server(
            found, identity.role, worker_id=worker_id, register=register, stop=stop
        ) as admin,
    ):
        named = found.model_copy(update={"worker_id": worker_id})
        yield ListeningProcess(named, identity, stop, admin)


@asynccontextmanager
async def joined(process: ListeningProcess[Settings]) -> AsyncIterator[Process[Settings]]:
    """Show metrics, and have a place in the cluster for the length of the block; waits for Redis.

    Raises:
        InUse: the metrics' address cannot be listened on.
        InvalidInput: the URL of Redis is wrong.
    """
    settings, status = process.settings, process.status
    place = settings.control
    status.metrics_address = place.advertised(serve_metrics(place.host, settings.metrics_port))
    async with Bus.connect(settings.redis_url, settings.cluster, status.waiting_for) as bus:
        status.generation = await next_generation(bus, process.identity.worker_id)
        async with AsyncExitStack() as parts:
            yield Process(
                settings,
                process.identity,
                process.stop,
                process.admin,
                bus,
                status.generation,
                parts,
            )


@asynccontextmanager
async def service(
    settings: Settings, identity: Identity, register: Register, stop: StopEvent
) -> AsyncIterator[Process[Settings]]:
    """Answer operators and have a place in the cluster: ``listening``, then ``joined``."""
    async with listening(settings, identity, register, stop) as process, joined(process) as member:
        yield member
