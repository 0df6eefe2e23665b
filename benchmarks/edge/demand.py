"""Demand of the servers, as their own reports to the scheduler have it: choices of every expert, exact."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import msgspec
import numpy as np

from benchmarks.common.suite import RunningSuite
from moesaic.cluster.redis.bus import Bus
from moesaic.messages.activation import ActivationReport
from moesaic.messages.placement import Placement
from moesaic.placement.traffic.origins import tokens_of
from moesaic.placement.traffic.statistics import Floats
from moesaic.services.expert.activations import STREAM
from moesaic.settings import ServiceSettings

_decoder: "msgspec.msgpack.Decoder[ActivationReport]" = msgspec.msgpack.Decoder(ActivationReport)


class DemandReader:
    """Adds up reports as they come.

    Attributes:
        demand: choices so far by server, layer and expert, float64 ``[N, L, E]``.
    """

    def __init__(self, num_sites: int, layers: Sequence[int], num_experts: int) -> None:
        self._sites = [f"agent-{site}" for site in range(num_sites)]
        self._layers, self._num_experts = layers, num_experts
        self.demand: Floats = np.zeros((num_sites, len(layers), num_experts))

    def take(self, report: ActivationReport) -> None:
        """Take in one report."""
        site = self._sites.index(report.window.worker_id)
        self.demand[site] += tokens_of(report.window, self._num_experts, self._layers)


@asynccontextmanager
async def demand_reader(
    suite: RunningSuite, num_sites: int, placed: Placement
) -> AsyncIterator[DemandReader]:
    """Read the reports of a suite for the length of the block; ``placed`` says which layers there are."""
    reader = DemandReader(num_sites, placed.layers, placed.num_experts)
    cluster = str(ServiceSettings.model_fields["cluster"].default)
    async with Bus.connect(suite.redis_url, cluster) as bus:

        async def read() -> None:
            async for report in bus.read_on(STREAM, _decoder):
                if report is not None:
                    reader.take(report)

        reading = asyncio.create_task(read())
        try:
            yield reader
        finally:
            reading.cancel()
            with suppress(asyncio.CancelledError):
                await reading
