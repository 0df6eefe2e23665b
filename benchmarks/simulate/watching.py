"""The scheduler's own predictor, beside a running suite: it hears what the scheduler hears."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import cast

from benchmarks.common.suite import RunningSuite
from moesaic.cluster.background import tended
from moesaic.cluster.leadership import Leadership
from moesaic.cluster.placement_view import watch_placement
from moesaic.cluster.redis.bus import Bus
from moesaic.cluster.registry import watch_fleet
from moesaic.services.scheduler.main import HALF_LIFE_S
from moesaic.services.scheduler.planning.traffic import TrafficFeed
from moesaic.services.scheduler.scaling.feed import LoadFeed
from moesaic.services.scheduler.scaling.predictor import FleetPredictor

CLUSTER = "default"


@asynccontextmanager
async def scheduler_predictor(suite: RunningSuite) -> AsyncIterator[FleetPredictor]:
    """Read the suite's reports as a leading scheduler does, and lead nothing."""
    reading = cast("Leadership", SimpleNamespace(held=True))
    async with (
        Bus.connect(suite.redis_url, CLUSTER) as bus,
        watch_placement(bus) as view,
        watch_fleet(bus) as fleet,
    ):
        traffic, load = TrafficFeed(bus, reading, view, HALF_LIFE_S), LoadFeed(bus, reading)
        async with tended(load.run, "load"), tended(traffic.run, "traffic"):
            yield FleetPredictor(fleet, view, traffic, load)
