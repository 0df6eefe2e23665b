"""Demand of the servers, as their own reports to the scheduler have it: choices of every expert, exact."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import msgspec
import numpy as np

from benchmarks.common.suite import RunningSuite
from moesaic.cluster.redis.bus import Bus
from moesaic.messages.activation_report import ActivationReport
from moesaic.placement.traffic.origins import tokens_of
from moesaic.placement.traffic.statistics import Floats
from moesaic.services.expert.activations import STREAM
from moesaic.settings import ServiceSettings

_decoder: "msgspec.msgpack.Decoder[ActivationReport]" = msgspec.msgpack.Decoder(ActivationReport)


class DemandReader:
    """Adds up reports as they come."""

    def __init__(self, num_sites: int) -> None:
        self._sites = [f"agent-{site}" for site in range(num_sites)]
        self._totals: dict[str, Floats] = {}

    def take(self, report: ActivationReport) -> None:
        """Take in one report."""
        window = report.window
        layers = [seen.layer for seen in window.layers]
        tokens = tokens_of(window, window.num_experts, layers)
        self._totals[window.worker_id] = self._totals.get(window.worker_id, 0) + tokens

    @property
    def demand(self) -> Floats:
        """Choices so far by server, layer and expert, float64 ``[N, L, E]``; a copy."""
        return np.stack([self._totals[site] for site in self._sites])


@asynccontextmanager
async def demand_reader(suite: RunningSuite, num_sites: int) -> AsyncIterator[DemandReader]:
    """Read the reports of a suite for the length of the block."""
    reader, cluster = DemandReader(num_sites), str(ServiceSettings.model_fields["cluster"].default)
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
