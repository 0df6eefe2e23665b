"""A session with a running suite: its users, its control plane, and the demand that servers report."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass

from benchmarks.common.suite import RunningSuite
from benchmarks.edge.arrivals import EdgeArrival, TaskStretch, arrivals
from benchmarks.edge.control import EdgeControl, edge_control
from benchmarks.edge.counts import CountsSample
from benchmarks.edge.demand import DemandReader, demand_reader
from benchmarks.edge.load import EdgeClients, PromptOf, rest_client
from benchmarks.edge.point import EdgePoint
from benchmarks.edge.stretch import EdgeStretch
from benchmarks.edge.tasks import TaskPrompts
from moesaic.placement.traffic.statistics import Floats

REPORTED_S = 1.5  # after a window, until the scheduler has read its report
SiteTasks = tuple[tuple[str, ...], ...]  # tasks of each server's users


@dataclass(frozen=True)
class EdgeSession:
    """All that is measured with."""

    point: EdgePoint
    control: EdgeControl
    reader: DemandReader
    clients: EdgeClients
    prompts: TaskPrompts

    async def learn(self, tasks: SiteTasks, per_s: float) -> Floats:
        """Send traffic that placements are planned from; return its demand ``[N, L, E]``."""
        stretch = TaskStretch(self.point.learn_s, tasks)
        due = arrivals([stretch], per_s, f"{self.point.seed} learn")
        await self._run(due, self.prompts.to_learn, "learn")
        await asyncio.sleep(self.point.window_s + REPORTED_S)
        return self.reader.demand.copy()

    async def measure(
        self, stretches: Sequence[TaskStretch], per_s: float, number: int, salt: str
    ) -> EdgeStretch:
        """Send traffic and look at counts meanwhile.

        Args:
            stretches: one after the other.
            per_s: requests of each server.
            number: of the round; the arrivals of one are always the same.
            salt: no KV is shared with traffic of another one.
        """
        due = arrivals(stretches, per_s, f"{self.point.seed} measure {number}")
        return await self._run(due, self.prompts.to_measure, salt)

    async def _run(self, due: Sequence[EdgeArrival], prompt: PromptOf, salt: str) -> EdgeStretch:
        samples = [CountsSample(0.0, await self.control.counts())]
        began_at, started = time.time(), time.perf_counter()
        sampling = asyncio.create_task(self.control.sample(samples))
        try:
            answers = await self.clients.ask_all(due, prompt, salt)
        finally:
            sampling.cancel()
            with suppress(asyncio.CancelledError):
                await sampling
        samples.append(CountsSample(time.perf_counter() - started, await self.control.counts()))
        return EdgeStretch(began_at, answers, samples)


@asynccontextmanager
async def edge_session(
    suite: RunningSuite, point: EdgePoint, prompts: TaskPrompts
) -> AsyncIterator[EdgeSession]:
    """Connect to all parts of a suite, and wait until experts are where they were first placed."""
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(rest_client(suite.port))
        control = await stack.enter_async_context(edge_control(suite, point.num_sites))
        await control.settled()
        reading = demand_reader(suite, point.num_sites, await control.placement())
        reader = await stack.enter_async_context(reading)
        yield EdgeSession(point, control, reader, EdgeClients(client, point.max_tokens), prompts)
