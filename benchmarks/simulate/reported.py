"""Costs of steps as workers report them, which need no client to be timed."""

import msgspec

from benchmarks.common.suite import RunningSuite
from moesaic.cluster.load_view import STREAM
from moesaic.cluster.redis.bus import Bus
from moesaic.messages.performance import FitSums, LoadReport

CLUSTER = "default"
MOST_REPORTS = 256
_decoder: "msgspec.msgpack.Decoder[LoadReport]" = msgspec.msgpack.Decoder(LoadReport)


async def reported_steps(suite: RunningSuite, since_s: float) -> list[FitSums]:
    """Read what attention workers have told since a time of day.

    Raises:
        RuntimeError: no report was due.
    """
    async with Bus.connect(suite.redis_url, CLUSTER) as bus:
        reports = await bus.latest(STREAM, _decoder, MOST_REPORTS)
    found = [
        report.costs["step"]
        for report in reports
        if report.role == "attention" and report.at >= since_s and "step" in report.costs
    ]
    if not found:
        raise RuntimeError("no worker has reported what its steps cost")
    return found
