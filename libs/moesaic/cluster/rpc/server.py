"""The gRPC server of a service: health, reflection, channelz, admin, and the service's own calls."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import structlog
from grpc_channelz.v1 import channelz
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from moesaic.addresses import host_port
from moesaic.cluster.rpc.admin import AdminServicer, DrainHook, ServiceStatus, StandbyHook
from moesaic.cluster.rpc.authentication import Authenticating
from moesaic.cluster.rpc.channels import SERVER_OPTIONS
from moesaic.cluster.security.credentials import Credentials, using
from moesaic.cluster.security.expiry import show_expiry
from moesaic.cluster.security.tls import Tls
from moesaic.errors import InUse
from moesaic.open_files import connections_within
from moesaic.settings import ServiceSettings
from moesaic.v1 import admin_pb2_grpc

log = structlog.get_logger()

__all__ = ["AdminServer", "DrainHook", "ServiceStatus", "StandbyHook", "admin_server"]

_MAX_CONCURRENT_CALLS = 1024
_MAX_CONNECTIONS, _CONNECTIONS_SHARE = 4096, 0.25
_SETTLE_S = 1.0
_LOADING_S = 5.0
_LAST_ANSWERS_S = 0.5  # time for running calls to end when the server closes


class AdminServer:
    """A running server.

    Attributes:
        address: ``host:port`` for others.
        status: state that ``GetInfo`` and the health service show; the service keeps it true.
        stop_requested: set by ``Shutdown``; the service's own stop event if one was given.
    """

    def __init__(
        self, address: str, status: ServiceStatus, stop: asyncio.Event, admin: AdminServicer
    ) -> None:
        self.address, self.status, self.stop_requested = address, status, stop
        self._admin = admin

    @property
    def grace_s(self) -> float:
        """Seconds for running work to finish: of the settings, or of the ``Shutdown`` call."""
        return self._admin.grace_s

    def on_drain(self, hook: DrainHook) -> None:
        """Await ``hook(True)`` in ``Drain`` and ``Shutdown``, ``hook(False)`` in ``Undrain``."""
        self._admin.on_drain.append(hook)

    def on_stand_by(self, hook: StandbyHook) -> None:
        """Await ``hook()`` in ``StandBy`` and ``Activate``, when they change something."""
        self._admin.on_stand_by.append(hook)


@asynccontextmanager
async def admin_server(
    settings: ServiceSettings,
    role: str,
    *,
    worker_id: str,
    generation: int = 0,
    register: Callable[[grpc.aio.Server], None] = lambda server: None,
    stop: asyncio.Event | None = None,
) -> AsyncIterator[AdminServer]:
    """Serve the calls of every service, and those that ``register`` adds, until the block ends.

    The server answers from the start; its health is NOT_SERVING until the status is ``ready`` or
    ``standby``. An unknown generation can be set later, as ``admin.status.generation``. If the
    settings have a secret, callers must know it, and this process's own calls carry tokens made
    from it. With certificates each end demands one of the other.

    Raises:
        InUse: the port cannot be listened on.
        InvalidInput: a certificate cannot be read.
    """
    with using(Credentials.of(settings)) as credentials:
        if (tls := credentials.tls) is not None:
            show_expiry(own=tls.cert, authority=tls.ca)
        served = _serve(settings, role, worker_id, generation, register, stop, credentials)
        async with served as server:
            yield server


@asynccontextmanager
async def _serve(
    settings: ServiceSettings,
    role: str,
    worker_id: str,
    generation: int,
    register: Callable[[grpc.aio.Server], None],
    stop: asyncio.Event | None,
    credentials: Credentials,
) -> AsyncIterator[AdminServer]:
    status = ServiceStatus(role, worker_id, generation)
    stop = stop or asyncio.Event()
    admin, health = AdminServicer(settings, status, stop), HealthServicer()
    server = new_server(credentials, worker_id)
    services = _Services(server)
    admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, services)  # type: ignore[arg-type]  # stands in for a server
    register(services)  # type: ignore[arg-type]  # stands in for a server
    names = ["", *services.names]
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    channelz.add_channelz_servicer(server)  # type: ignore[arg-type]  # the stubs know no asyncio
    reflection.enable_server_reflection(
        [
            *services.names,
            "grpc.health.v1.Health",
            "grpc.channelz.v1.Channelz",
            reflection.SERVICE_NAME,
        ],
        server,
    )
    place = settings.control
    try:
        port = listen(server, place.host, settings.admin_port, credentials.tls)
    except RuntimeError as error:
        raise InUse(
            "admin_port",
            f"cannot listen on {host_port(place.host, settings.admin_port)}: the port is in use or the "
            "address is not of this host; choose another with --admin-port or --control-host",
        ) from error
    for name in names:
        await health.set(name, health_pb2.HealthCheckResponse.NOT_SERVING)
    await server.start()
    followers = [
        asyncio.create_task(_follow(status, health, names), name="health"),
        asyncio.create_task(_say_what_it_waits_for(status), name="waiting"),
        asyncio.create_task(_say_what_it_loads(status), name="loading"),
    ]
    try:
        yield AdminServer(host_port(place.advertised_host, port), status, stop, admin)
    finally:
        for follower in followers:
            follower.cancel()
        await health.enter_graceful_shutdown()
        await server.stop(_LAST_ANSWERS_S)


class _Services:
    """Passes registrations on to a server, and keeps the names of its services."""

    def __init__(self, server: grpc.aio.Server) -> None:
        self.names: list[str] = []
        self._server = server

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        self._server.add_generic_rpc_handlers(handlers)

    def add_registered_method_handlers(self, service_name: str, handlers: Any) -> None:
        self.names.append(service_name)
        self._server.add_registered_method_handlers(service_name, handlers)  # type: ignore[attr-defined]  # missing in the stubs


async def _follow(status: ServiceStatus, health: HealthServicer, names: list[str]) -> None:
    """Keep the health of every service equal to the status."""
    while True:
        await status.changed.wait()
        status.changed.clear()
        serving = status.state in ("ready", "standby")
        for name in names:
            await health.set(
                name,
                health_pb2.HealthCheckResponse.SERVING
                if serving
                else health_pb2.HealthCheckResponse.NOT_SERVING,
            )


async def _say_what_it_waits_for(status: ServiceStatus) -> None:
    """Log reasons of a wait that lasts more than a moment, and its end."""
    said: list[str] = []
    before: list[str] = []
    while True:
        await asyncio.sleep(_SETTLE_S)
        now = list(status.waiting_for)
        # A wait of a moment is not worth a line.
        if now == before != said:
            said = now
            log.info("service.waiting" if now else "service.waited", waiting_for=now)
        before = now


async def _say_what_it_loads(status: ServiceStatus) -> None:
    """Log the progress of loading every few seconds."""
    while True:
        await asyncio.sleep(_LOADING_S)
        look = status.progress.look() if status.progress else None
        if look is not None:
            left_s = None if look.left_s is None else round(look.left_s, 1)
            log.info(
                "weights.loading",
                done_bytes=look.done,
                total_bytes=look.total,
                bytes_per_s=round(look.rate),
                left_s=left_s,
            )


def new_server(credentials: Credentials, worker_id: str) -> grpc.aio.Server:
    """Make a server that admits callers with a token for ``worker_id``, if the cluster has a secret."""
    tokens = credentials.tokens
    most = connections_within(_CONNECTIONS_SHARE, _MAX_CONNECTIONS)
    return grpc.aio.server(
        interceptors=[Authenticating(tokens, worker_id)] if tokens else [],
        options=[*SERVER_OPTIONS, ("grpc.max_allowed_incoming_connections", most)],
        maximum_concurrent_rpcs=_MAX_CONCURRENT_CALLS,
    )


def listen(server: grpc.aio.Server, host: str, port: int, tls: Tls | None) -> int:
    """Listen, encrypted if there are certificates; return the port.

    Raises:
        RuntimeError: the port is in use, or the address is not of this host.
    """
    if tls is not None:
        return server.add_secure_port(host_port(host, port), tls.server_credentials())
    return server.add_insecure_port(host_port(host, port))
