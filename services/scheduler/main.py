"""The scheduler: builds the parts, serves, stops."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import msgspec
import structlog

from moesaic.cluster.background import tended
from moesaic.cluster.brownout_view import DECISIONS, POLICY, STREAM
from moesaic.cluster.leadership import Leadership, leadership
from moesaic.cluster.lifecycle import run_service, stop_event
from moesaic.cluster.placement_view import PlacementView, watch_placement
from moesaic.cluster.redis.bus import Bus
from moesaic.cluster.registry import tidy_index, watch_fleet
from moesaic.cluster.rpc.server import ServiceStatus
from moesaic.cluster.service import introduce, service
from moesaic.messages.brownout import BrownoutDecision, BrownoutHint, BrownoutPolicy
from moesaic.messages.decisions import PlacementPolicy
from moesaic.services.scheduler.admin import Parts, SchedulerAdmin
from moesaic.services.scheduler.epochs.placer import Cluster
from moesaic.services.scheduler.epochs.store import EpochStore
from moesaic.services.scheduler.following import follow_while_leading
from moesaic.services.scheduler.log import DecisionLog
from moesaic.services.scheduler.loop import Measured, PlacementLoop, PlacementOrders
from moesaic.services.scheduler.planning.site_profiles import SiteProfiles
from moesaic.services.scheduler.planning.traffic import TrafficFeed
from moesaic.services.scheduler.scaling.actions import ActionStore
from moesaic.services.scheduler.scaling.actuators.registry import actuator_of
from moesaic.services.scheduler.scaling.controller import ScalingController, ScalingParts
from moesaic.services.scheduler.scaling.feed import LoadFeed
from moesaic.services.scheduler.scaling.predictor import FleetPredictor
from moesaic.services.scheduler.settings import SchedulerSettings
from moesaic.services.scheduler.versioned import PLACEMENT, SCALING, VersionedStore
from moesaic.v1 import scheduler_pb2_grpc

log = structlog.get_logger()

_SHOW_S = 0.25
_brownout_decisions = msgspec.msgpack.Decoder(BrownoutDecision)
HALF_LIFE_S = 300.0  # of traffic, in what placements are planned from


async def serve(settings: SchedulerSettings) -> None:
    """Serve until SIGTERM or SIGINT. The parts start top down and stop bottom up, errors or not."""
    identity = introduce(settings, "scheduler")
    api = SchedulerAdmin()
    register = partial(scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server, api)
    async with stop_event() as stop, service(settings, identity, register, stop) as process:
        bus, settings, enter = process.bus, process.settings, process.enter
        view, fleet = await enter(watch_placement(bus)), await enter(watch_fleet(bus))
        leader = await enter(leadership(bus, "scheduler", identity.worker_id, process.generation))
        epochs, decisions = EpochStore(bus, leader, view), DecisionLog(bus)
        placement_policy = PlacementPolicy(policy=settings.placement_policy)
        policies = VersionedStore(bus, epochs, leader, PLACEMENT, placement_policy)
        scaling_policy = VersionedStore(bus, epochs, leader, SCALING, settings.scaling_policy)
        brownout = VersionedStore(
            bus,
            epochs,
            leader,
            POLICY,
            BrownoutPolicy(mode=settings.brownout),
            lambda policy: bus.append(STREAM, BrownoutHint(mode=policy.mode)),
        )

        def is_origin(worker_id: str) -> bool:
            record = fleet.workers.get(worker_id)
            return record is not None and record.role == "edge-agent"

        feed = TrafficFeed(bus, leader, view, HALF_LIFE_S, is_origin)
        profiles = SiteProfiles(bus, leader)
        loop = PlacementLoop(
            Cluster(fleet, view, leader, epochs),
            PlacementOrders(policies, lambda: brownout.current.substitution),
            Measured(feed, profiles),
            decisions,
            settings,
        )
        await decisions.refresh()
        actions = ActionStore(bus, epochs, leader)
        load = LoadFeed(bus, leader)
        actuator = actuator_of(settings, bus, fleet, view)
        scaling = ScalingController(
            ScalingParts(
                fleet,
                view,
                leader,
                scaling_policy,
                actions,
                load,
                FleetPredictor(fleet, view, feed, load),
                decisions,
                brownout,
                actuator,
            )
        )
        api.open(
            Parts(
                fleet,
                view,
                loop,
                policies,
                decisions,
                feed,
                brownout,
                scaling_policy,
                actions,
                scaling,
            )
        )
        tasks: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
            "load": load.run,
            "scaling": scaling.run,
            "traffic": feed.run,
            "profiles": profiles.run,
            "placer": loop.run,
            "placement policy": policies.run,
            "scaling policy": scaling_policy.run,
            "scaling action": actions.run,
            "brownout policy": brownout.run,
            "brownout decisions": partial(follow_brownout, bus, leader, decisions),
            "index": partial(tidy_index, bus),
            "show": partial(_show, process.status, view, loop),
        }
        for name, work in tasks.items():
            await enter(tended(work, name))
        await process.registered("ready")
        process.status.set_state("ready")
        log.info(
            "service.ready",
            admin_address=process.admin.address,
            metrics_address=process.status.metrics_address,
        )
        await process.stop.wait()
        process.status.set_state("draining")


async def follow_brownout(bus: Bus, leadership: Leadership, decisions: DecisionLog) -> None:
    """Take the decisions of workers about brownout into the log while this scheduler leads, for ever."""
    await follow_while_leading(
        bus,
        leadership,
        DECISIONS,
        _brownout_decisions,
        decisions.note_brownout,
        begin=decisions.refresh,  # not to log again what the leader before has logged
    )


async def _show(status: ServiceStatus, view: PlacementView, loop: PlacementLoop) -> None:
    """Keep what operators see true."""
    while True:
        status.waiting_for, status.epoch = loop.waiting_for, view.epoch
        if view.current is not None:
            status.model_digest = view.current.model_digest
        await asyncio.sleep(_SHOW_S)


def run(settings: SchedulerSettings) -> None:
    """Serve in this process, to its end."""
    run_service(serve(settings))
