"""Costs of steps as workers report them, which need no client to be timed."""

import asyncio
import time
from collections.abc import Sequence

import msgspec

from benchmarks.common.suite import RunningSuite
from moesaic.cluster.load_view import STREAM
from moesaic.cluster.redis.bus import Bus
from moesaic.messages.performance import FitSums, LoadReport

CLUSTER = "default"
MOST_REPORTS = 256
WITHIN_S, LOOK_S = 30.0, 0.2
_decoder: "msgspec.msgpack.Decoder[LoadReport]" = msgspec.msgpack.Decoder(LoadReport)


async def reported_steps(suite: RunningSuite) -> list[FitSums]:
    """Wait for what each attention worker tells of all its steps until now.

    Raises:
        TimeoutError: no report came.
    """
    since_s = time.time()
    async with Bus.connect(suite.redis_url, CLUSTER) as bus, asyncio.timeout(WITHIN_S):
        while True:
            reports = await bus.latest(STREAM, _decoder, MOST_REPORTS)
            if found := _newest(reports, since_s):
                return found
            await asyncio.sleep(LOOK_S)


def _newest(reports: Sequence[LoadReport], since_s: float) -> list[FitSums]:
    newest = {
        report.worker_id: report
        for report in sorted(reports, key=lambda each: each.at)
        if report.role == "attention" and report.at >= since_s and "step" in report.costs
    }
    return [report.costs["step"] for report in newest.values()]
