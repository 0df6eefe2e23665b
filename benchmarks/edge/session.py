"""A session with a running suite: its users, its control plane, and the demand that servers report."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass

from benchmarks.common.suite import RunningSuite
from benchmarks.edge.arrivals import EdgeArrival, TaskStretch, arrivals
from benchmarks.edge.control import EdgeControl, NoPlan, edge_control
from benchmarks.edge.counts import CountsSample
from benchmarks.edge.demand import DemandReader, demand_reader
from benchmarks.edge.load import EdgeClients, PromptOf
from benchmarks.edge.point import EdgePoint
from benchmarks.edge.stretch import EdgeStretch
from benchmarks.edge.tasks import TaskPrompts
from moesaic.cli.load.generator import COMPLETIONS, LoadClient
from moesaic.cli.terminal.console import say
from moesaic.messages.placement import Placement
from moesaic.placement.traffic.statistics import Floats

TRIES = 3  # to learn
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

    async def learn(
        self, tasks: SiteTasks, per_s: float, policies: Sequence[str]
    ) -> tuple[dict[str, Placement], Floats]:
        """Send traffic, and have the scheduler plan from it.

        Returns:
            The placement of each policy; the demand that it was made from, ``[N, L, E]``.

        Raises:
            NoPlan: not even after more traffic.
        """
        stretch = TaskStretch(self.point.learn_s, tasks)
        for number in range(TRIES):
            due = arrivals([stretch], per_s, f"{self.point.seed} learn {number}")
            await self._run(due, self.prompts.to_learn, f"learn {number}")
            await asyncio.sleep(self.point.window_s + REPORTED_S)
            try:
                plans = {policy: await self.control.plan(policy) for policy in policies}
                return plans, self.reader.demand.copy()
            except NoPlan as error:
                say(f"no plan: {error}")
        raise NoPlan(f"none after {TRIES} times {self.point.learn_s:.0f} s of traffic")

    async def measure(
        self,
        stretches: Sequence[TaskStretch],
        per_s: float,
        number: int,
        salt: str,
        start_s: float = 0.0,
    ) -> EdgeStretch:
        """Send traffic and look at counts meanwhile.

        Args:
            stretches: one after the other.
            per_s: requests of each server.
            number: number of the round; the arrivals of one are always the same.
            salt: no KV is shared with traffic of another one.
            start_s: leave out what comes earlier.
        """
        due = arrivals(stretches, per_s, f"{self.point.seed} measure {number}")
        due = [arrival for arrival in due if arrival.due_s >= start_s]
        return await self._run(due, self.prompts.to_measure, salt, start_s)

    async def _run(
        self, due: Sequence[EdgeArrival], prompt: PromptOf, salt: str, start_s: float = 0.0
    ) -> EdgeStretch:
        began_at, started = time.time() - start_s, time.perf_counter() - start_s
        samples = [CountsSample(start_s, await self.control.counts())]
        sampling = asyncio.create_task(self.control.sample(samples, started))
        try:
            answers = await self.clients.ask_all(due, prompt, salt, start_s)
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
        client = LoadClient(suite.port, COMPLETIONS)
        stack.callback(client.close)
        control = await stack.enter_async_context(edge_control(suite, point.num_sites))
        await control.settled()
        reading = demand_reader(suite, point.num_sites, await control.placement())
        reader = await stack.enter_async_context(reading)
        yield EdgeSession(point, control, reader, EdgeClients(client, point.max_tokens), prompts)
