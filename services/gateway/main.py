"""The gateway: builds the parts, serves, drains."""

import asyncio
import gc
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from functools import partial

import structlog
import uvicorn
import uvloop
from prometheus_client import REGISTRY
from starlette.types import ASGIApp

from moesaic.addresses import host_port, is_address
from moesaic.cluster.background import again_and_again
from moesaic.cluster.lifecycle import run_service, stop_event
from moesaic.cluster.placement_view import PlacementView, watch_placement
from moesaic.cluster.registry import Fleet, Lease, watch_fleet
from moesaic.cluster.rpc.server import AdminServer
from moesaic.cluster.service import Process, introduce, joined, listening
from moesaic.errors import InUse, InvalidInput
from moesaic.loopback import is_loopback
from moesaic.models.weights.hub import local_model
from moesaic.origins import ANY, listed
from moesaic.services.gateway.admin import GatewayAdmin
from moesaic.services.gateway.app import make_app
from moesaic.services.gateway.batches.runner import BatchRunner
from moesaic.services.gateway.console.collector import Collector
from moesaic.services.gateway.gateway import Gateway
from moesaic.services.gateway.http.certificates import Certificates
from moesaic.services.gateway.http.handshake import accept
from moesaic.services.gateway.http.protocol import BoundedHttp, Connections
from moesaic.services.gateway.language import Language
from moesaic.services.gateway.metrics import watch_loop
from moesaic.services.gateway.readiness import lacking_experts
from moesaic.services.gateway.settings import GatewaySettings
from moesaic.services.gateway.vllm_metrics import VllmNames
from moesaic.v1 import gateway_pb2_grpc

log = structlog.get_logger()

LOOP_BACK_S = 0.0005  # for which a thread that reads a long text may keep the event loop waiting
OBSERVE_EVERY_S = 0.25
REST_SHARE, CONSOLE_SHARE = 0.5, 0.05  # of the files that may be open, for connections
LAST_EVENTS_S = 2.0  # for error events to reach the clients of streams that did not finish
KEEP_CONNECTION_S = (
    75  # longer than clients keep theirs, or they send into a connection that closes
)


async def serve(settings: GatewaySettings) -> None:
    """Serve until SIGTERM or SIGINT. The parts start top down and stop bottom up, errors or not."""
    identity = introduce(settings, "gateway")
    # Of a name it is known later which address it stands for.
    if is_address(settings.host):
        _check_exposure(settings)
    directory = await asyncio.to_thread(local_model, settings.model, weights=False)
    parsers = settings.tool_call_parser, settings.reasoning_parser
    opening = partial(Language, directory, *parsers, max_model_len=settings.max_model_len)
    gateway = Gateway(settings, await asyncio.to_thread(opening))
    if defaults := gateway.defaults.model_dump(exclude_unset=True):
        log.info("gateway.model_defaults", **defaults, off="--generation-config none")
    if settings.metrics_compat == "vllm":
        REGISTRY.register(VllmNames(gateway.model_name, gateway.workers.routing.router))
    register = partial(
        gateway_pb2_grpc.add_GatewayServiceServicer_to_server, GatewayAdmin(gateway.workers.routing)
    )
    with closing(gateway.language):
        async with stop_event() as stop, listening(settings, identity, register, stop) as listener:
            _check_exposure(listener.settings)
            listener.status.model = gateway.model_name
            app = make_app(gateway)
            async with (
                http_server(listener.settings, app) as address,
                console_server(gateway, listener.settings),
                joined(listener) as process,
            ):
                await serve_http(gateway, app, address, process)


async def serve_http(
    gateway: Gateway, app: ASGIApp, address: str, process: Process[GatewaySettings]
) -> None:
    """Follow the cluster and answer, until the process shall stop; then let what runs finish."""
    fleet = await process.enter(watch_fleet(process.bus))
    placement = await process.enter(watch_placement(process.bus))
    lease = await process.registered(
        "starting", config_digest=gateway.language.config.answering_digest
    )
    gateway.console = Collector(process.identity.worker_id, gateway, fleet, placement)
    async with asyncio.TaskGroup() as tasks:
        observing = partial(observe, gateway, process.admin, fleet, placement, lease)
        following = tasks.create_task(
            again_and_again(partial(gateway.workers.follow, fleet), "workers")
        )
        watching = tasks.create_task(again_and_again(observing, "observe"))
        reading = tasks.create_task(gateway.tenants.follow())
        batches = tasks.create_task(carry_out_batches(gateway, app))
        lag = tasks.create_task(watch_loop())

        async def drain(on: bool) -> None:
            gateway.draining = on

        process.admin.on_drain(drain)
        log.info("gateway.serving", address=address, model=gateway.model_name)
        await process.stop.wait()
        process.status.set_state("draining")
        # Another process goes on with them, or this one when it is back.
        batches.cancel()
        await finish_running(gateway, process.admin.grace_s)
        # Their streams have no end of their own, and would hold the stop up.
        gateway.console.end()
        watching.cancel()
        following.cancel()
        reading.cancel()
        lag.cancel()


async def carry_out_batches(gateway: Gateway, app: ASGIApp) -> None:
    """Carry out the batches that are kept, if any are, until cancelled."""
    if gateway.store is not None:
        await BatchRunner(gateway, app, gateway.store).run()


async def observe(
    gateway: Gateway, admin: AdminServer, fleet: Fleet, placement: PlacementView, lease: Lease
) -> None:
    """Show the gateway what the cluster knows, and the cluster whether the gateway is ready."""
    seen = None
    while True:
        if seen != (seen := (fleet.version, placement.version)):
            gateway.lacking_experts = lacking_experts(placement.current, fleet.workers)
            gateway.other_protocol = fleet.other_protocol
        failing = gateway.failing_checks()
        admin.status.epoch = placement.epoch
        admin.status.waiting_for[:] = [str(error) for error in failing.values()]
        if not gateway.draining:
            admin.status.set_state("starting" if failing else "ready")
        admin.status.model_digest = gateway.workers.model_digest
        await lease.update(state=admin.status.state, model_digest=admin.status.model_digest)
        await asyncio.sleep(OBSERVE_EVERY_S)


async def finish_running(gateway: Gateway, grace_s: float) -> None:
    """Take nothing new; let what runs finish, and end what does not with an error."""
    gateway.draining = True
    log.info("gateway.draining", inflight=gateway.num_inflight)
    if not await _idle(gateway, grace_s):
        log.warning("gateway.aborting", inflight=gateway.num_inflight)
        gateway.abort_all()
        await _idle(gateway, LAST_EVENTS_S)


async def _idle(gateway: Gateway, within_s: float) -> bool:
    try:
        async with asyncio.timeout(within_s):
            await gateway.idle.wait()
    except TimeoutError:
        return False
    return True


@asynccontextmanager
async def console_server(gateway: Gateway, settings: GatewaySettings) -> AsyncIterator[None]:
    """Show the console on a listener of its own for the length of the block, if the settings have one.

    Raises:
        InUse: the port cannot be listened on.
        InvalidInput: anyone on the network could use it, and nobody said so.
    """
    if not settings.console_port:
        yield
        return
    own = settings.model_copy(update={"host": settings.console_host, "port": settings.console_port})
    _check_exposure(own)
    app = make_app(gateway, shows_console=True)
    async with http_server(own, app, flags="console-", share=CONSOLE_SHARE) as address:
        log.info("console.serving", address=address)
        yield


@asynccontextmanager
async def http_server(
    settings: GatewaySettings, app: ASGIApp, flags: str = "", share: float = REST_SHARE
) -> AsyncIterator[str]:
    """Answer HTTP for the length of the block; gives the ``host:port`` that is listened on.

    Args:
        settings: with host and port.
        app: the application.
        flags: beginning of the names of the flags for these.
        share: of the files that this process may open, for connections.

    Raises:
        InUse: the port cannot be listened on.
        InvalidInput: a certificate cannot be used.
    """
    certificates = _certificates(settings)
    listener = _listen(settings.host, settings.port, flags)
    config = uvicorn.Config(
        app,
        http=BoundedHttp,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # nothing here depends on who forwards
        timeout_keep_alive=KEEP_CONNECTION_S,
        timeout_graceful_shutdown=round(LAST_EVENTS_S),
    )
    config.load()
    server = _Server(config, share)
    # Of HTTPS, connections are accepted here: uvicorn would not bound their handshakes.
    sockets = [listener] if certificates is None else []
    tasks = [asyncio.create_task(server.serve(sockets=sockets), name="http")]
    if certificates is not None:
        make = partial(BoundedHttp, config, server.server_state, {})
        accepting = accept(listener, certificates, server.server_state, make)
        tasks += [asyncio.create_task(each) for each in (accepting, certificates.follow())]
    serving, *others = tasks
    try:
        yield host_port(settings.host, listener.getsockname()[1])
    finally:
        for each in others:
            each.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        server.should_exit = True
        await serving
        listener.close()


def _certificates(settings: GatewaySettings) -> Certificates | None:
    given = (
        settings.ssl_certfile,
        settings.ssl_keyfile,
        settings.ssl_ca_certs,
        settings.ssl_cert_reqs,
    )
    return Certificates(*given) if any(given) else None


class _Server(uvicorn.Server):
    server_state: Connections

    def __init__(self, config: uvicorn.Config, share: float) -> None:
        super().__init__(config)
        self.server_state = Connections(share)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the service's own stop event."""
        yield


def _listen(host: str, port: int, flags: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only where the protocol is named; left on, answers wait 40 ms for an ACK.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        # Before the address is given away: the server itself begins some time later.
        listener.listen()
    except OSError as error:
        listener.close()
        fix = (
            f"cannot listen on {host}:{port}: {error.strerror or error}; "
            f"choose another with --{flags}port or --{flags}host"
        )
        raise InUse(f"{flags}port", fix) from error
    return listener


def _check_exposure(settings: GatewaySettings) -> None:
    """Raises InvalidInput if anyone on the network, or any web page, could use the gateway, and nobody said so."""
    key = settings.api_key.get_secret_value() or settings.api_keys_file
    if ANY in listed(settings.allowed_origins) and not key and not settings.no_auth:
        fix = f"{ANY} lets every web page use a gateway without keys: set --api-key, or --no-auth"
        raise InvalidInput("--allowed-origins", fix)
    if key or settings.no_auth or is_loopback(settings.host):
        return
    fix = (
        f"or --api-keys-file is required to listen on {settings.host}: "
        "set one, or serve everyone with --no-auth"
    )
    raise InvalidInput("--api-key", fix)


def run(settings: GatewaySettings) -> None:
    """Serve in this process, to its end."""
    sys.setswitchinterval(LOOP_BACK_S)
    # Passes over all objects hold the loop, by default after 70,000 new ones; requests leave no garbage.
    gc.set_threshold(700, 10, 100)
    run_service(serve(settings), uvloop.new_event_loop)
