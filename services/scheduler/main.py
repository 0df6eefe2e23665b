"""The scheduler: builds the parts, serves, stops."""

import asyncio
import os
import socket
from contextlib import AsyncExitStack

import structlog

import moesaic
from moesaic.cluster.background import background
from moesaic.cluster.bus import Bus
from moesaic.cluster.grpc_server import ServiceStatus, admin_server
from moesaic.cluster.leadership import leadership
from moesaic.cluster.lifecycle import run_service, stop_event
from moesaic.cluster.own_addresses import own_addresses
from moesaic.cluster.placement_view import PlacementView, watch_placement
from moesaic.cluster.registry import next_generation, registered, tidy_index, watch_fleet
from moesaic.messages.registry import WorkerRecord
from moesaic.telemetry.logs import configure_logging
from moesaic.telemetry.metrics import serve_metrics
from moesaic.v1 import scheduler_pb2_grpc
from services.scheduler.admin import Parts, SchedulerAdmin
from services.scheduler.decisions import DecisionLog
from services.scheduler.epochs import EpochStore
from services.scheduler.placer import Placer
from services.scheduler.planner import Planner
from services.scheduler.policies import PolicyStore
from services.scheduler.replanner import Replanner
from services.scheduler.settings import SchedulerSettings
from services.scheduler.traffic import TrafficFeed

log = structlog.get_logger()

_SHOW_S = 0.25
HALF_LIFE_S = 300.0  # of traffic, in what placements are planned from


async def serve(settings: SchedulerSettings) -> None:
    """Serve until SIGTERM or SIGINT. The parts start top down and stop bottom up, errors or not."""
    worker_id = settings.identity("scheduler")
    configure_logging("scheduler", worker_id, settings.log_level)
    service = SchedulerAdmin()
    async with AsyncExitStack() as parts:
        enter = parts.enter_async_context
        stop = await enter(stop_event())
        settings = await enter(own_addresses(settings))
        admin = await enter(
            admin_server(
                settings,
                "scheduler",
                worker_id=worker_id,
                stop=stop,
                register=lambda server: scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(
                    service, server
                ),
            )
        )
        metrics_address = admin.status.metrics_address = settings.control.advertised(
            serve_metrics(settings.control.host, settings.metrics_port)
        )
        bus = await enter(
            Bus.connect(settings.redis_url, settings.cluster, admin.status.waiting_for)
        )
        generation = admin.status.generation = await next_generation(bus, worker_id)
        record = WorkerRecord(
            worker_id=worker_id,
            generation=generation,
            role="scheduler",
            state="ready",
            admin_address=admin.address,
            metrics_address=metrics_address,
            node=socket.gethostname(),
            pid=os.getpid(),
            version=moesaic.__version__,
        )
        view, fleet = await enter(watch_placement(bus)), await enter(watch_fleet(bus))
        leader = await enter(leadership(bus, "scheduler", worker_id, generation))
        epochs, decisions = EpochStore(bus, leader, view), DecisionLog(bus)
        policies = PolicyStore(bus, epochs, settings.placement_policy)
        feed = TrafficFeed(bus, leader, view, HALF_LIFE_S)
        planner = Planner(feed, settings.replan_gain)
        replanner = Replanner(planner, feed, policies, decisions, settings.replan_interval_s)
        placer = Placer(fleet, view, leader, epochs, policies, replanner, settings)
        await decisions.refresh()
        service.open(Parts(fleet, view, placer, policies, decisions, replanner, feed))
        await enter(background(feed.run(), "traffic"))
        await enter(background(placer.run(), "placer"))
        await enter(background(tidy_index(bus), "index"))
        await enter(background(_show(admin.status, view, placer), "show"))
        await enter(registered(bus, record))
        admin.status.set_state("ready")
        log.info("service.ready", admin_address=admin.address, metrics_address=metrics_address)
        await stop.wait()
        admin.status.set_state("draining")


async def _show(status: ServiceStatus, view: PlacementView, placer: Placer) -> None:
    """Keep what operators see true."""
    while True:
        status.waiting_for, status.epoch = placer.waiting_for, view.epoch
        if view.current is not None:
            status.model_digest = view.current.model_digest
        await asyncio.sleep(_SHOW_S)


def run(settings: SchedulerSettings) -> None:
    """Serve in this process, to its end."""
    run_service(serve(settings))
