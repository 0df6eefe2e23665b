"""What an expert worker tells of its batches, whatever goes wrong meanwhile."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import torch

from moesaic.cluster.redis.bus import Bus
from moesaic.errors import PeerLost
from moesaic.experts.activations import ActivationMeter
from moesaic.experts.epochs import Epochs
from moesaic.services.expert.activations import ActivationReporter


class Sink:
    """Takes what is appended, after it has failed as it was told to."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.taken: list[Any] = []

    async def append(self, stream: str, report: Any, max_entries: int) -> None:
        if self.failures:
            raise self.failures.pop(0)
        self.taken.append(report)


async def test_one_that_cannot_be_told_stops_neither_the_worker_nor_the_next() -> None:
    sink, meter = Sink(ValueError("a fault of ours"), PeerLost("redis", "gone")), ActivationMeter(4)
    epochs = SimpleNamespace(in_force=1)
    reporter = ActivationReporter(
        cast("Bus", sink), meter, cast("Epochs", epochs), "e", 1, "m", window_s=0.001
    )
    reporting = asyncio.create_task(reporter.run())

    while not sink.taken:
        meter.record(1, 0, torch.tensor([[0, 1]], dtype=torch.int32), 2)
        await asyncio.sleep(0.001)

    assert not reporting.done()
    reporting.cancel()
    assert sink.taken[0].dropped == 1
    assert reporter.totals[0].batches >= 3
