"""A controller over a real Redis, with workers and choices of a test's own."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from moesaic.cluster.brownout_view import POLICY
from moesaic.cluster.leadership import leadership
from moesaic.cluster.registry import Fleet
from moesaic.errors import NotReady
from moesaic.messages.brownout import BrownoutPolicy
from moesaic.messages.registry import WorkerRecord
from moesaic.messages.scaling import FleetShape, ScalingDecision, ScalingPolicy
from moesaic.scaling.contract import RecentDemand, ScalingChoice, ScalingState
from moesaic.services.scheduler.epochs.store import EpochStore
from moesaic.services.scheduler.log import DecisionLog
from moesaic.services.scheduler.scaling.actions import ActionStore
from moesaic.services.scheduler.scaling.controller import (
    ScalingController,
    ScalingParts,
)
from moesaic.services.scheduler.scaling.facts import active_shape
from moesaic.services.scheduler.scaling.feed import LoadFeed
from moesaic.services.scheduler.versioned import SCALING, VersionedStore

ONE, TWO, THREE = FleetShape(1, 0), FleetShape(2, 0), FleetShape(3, 0)


def attention_workers(number: int) -> dict[str, WorkerRecord]:
    names = [f"attention-{n}" for n in range(number)]
    return {
        name: WorkerRecord(
            worker_id=name, generation=1, role="attention", state="ready", admin_address=f"{name}:1"
        )
        for name in names
    }


class Workers:
    """An actuator, and the workers that it brings when a test lets it."""

    name = "of a test"

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.wanted: list[FleetShape] = []
        self.failing = ""
        self.brings = True
        self.set_to: FleetShape | None = None
        self.broken: Exception | None = None

    async def most(self) -> FleetShape:
        return THREE

    async def intended(self) -> FleetShape:
        return self.set_to or active_shape(self.fleet)

    async def apply(self, wanted: FleetShape) -> None:
        if self.broken is not None:
            raise self.broken
        if self.failing:
            raise NotReady(self.failing)
        if self.wanted[-1:] != [wanted]:
            self.wanted.append(wanted)
        if self.brings:
            self.fleet.workers = attention_workers(wanted.attention)

    async def close(self) -> None:
        """Nothing to close."""


class Choices:
    """A predictor that says what a test has it say."""

    def __init__(self) -> None:
        self.choice: ScalingChoice | None = None
        self.asked: list[ScalingState] = []
        self.broken: Exception | None = None

    def demand(self, policy: ScalingPolicy) -> RecentDemand:
        none = np.zeros(0, np.int64)
        return RecentDemand(np.zeros(0), none, none, policy.window_s)

    async def choose(self, policy: ScalingPolicy, state: ScalingState) -> ScalingChoice | None:
        self.asked.append(state)
        if self.broken is not None:
            raise self.broken
        return self.choice if self.choice and self.choice.wanted != state.shape else None


class Clock:
    """The time of day."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


class Looks:
    """A controller's looks: each begins when a test lets it, and no time passes between two."""

    def __init__(self) -> None:
        self._may_look, self._looked = asyncio.Semaphore(0), asyncio.Semaphore(0)

    async def pause(self, seconds: float) -> None:
        """End a look, and wait for the next one."""
        self._looked.release()
        await self._may_look.acquire()

    async def next(self) -> None:
        """Let the controller look once, to the end."""
        await self._looked.acquire()
        self._may_look.release()


class Scheduler:
    """One scheduler's part in scaling."""

    def __init__(self, bus: Any, view: Any, lead: Any, fleet: Fleet, clock: Clock) -> None:
        epochs = EpochStore(bus, lead, view)
        self.policy = VersionedStore(bus, epochs, lead, SCALING, ScalingPolicy(interval_s=0.5))
        self.actions = ActionStore(bus, epochs, lead, clock)
        self.brownout = VersionedStore(bus, epochs, lead, POLICY, BrownoutPolicy())
        self.log = DecisionLog(bus, clock)
        self.workers, self.choices = Workers(fleet), Choices()
        self.clock, self.looks = clock, Looks()
        self.feed = LoadFeed(bus, lead, clock)
        self.controller = ScalingController(
            ScalingParts(
                fleet,
                view,
                lead,
                self.policy,
                self.actions,
                self.feed,
                self.choices,
                self.log,
                self.brownout,
                self.workers,
            ),
            clock,
            self.looks.pause,
        )

    async def set(self, **changes: Any) -> None:
        await self.policy.change(lambda before: ScalingPolicy(**{"interval_s": 0.5} | changes))

    async def until(self, condition: Callable[[], bool], *, passing_s: float = 0.0) -> None:
        """Let the controller look until something holds; ``passing_s`` pass before each look."""
        while not condition():
            self.clock.now += passing_s
            await self.looks.next()

    async def decision(self, found: Callable[[ScalingDecision], bool]) -> ScalingDecision:
        """Let the controller look until there is such a decision in the log."""

        def there() -> list[ScalingDecision]:
            return list(filter(found, self.log.recent_scaling(10)))

        await self.until(lambda: bool(there()))
        return there()[0]


@asynccontextmanager
async def scheduling(
    suite: Any, fleet: Fleet, clock: Clock, name: str = "s0"
) -> AsyncIterator[Scheduler]:
    async with leadership(suite.bus, "scheduler", name, 1) as lead:
        scheduler = Scheduler(suite.bus, suite.view, lead, fleet, clock)
        running = asyncio.create_task(scheduler.controller.run())
        try:
            yield scheduler
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


def choice(wanted: FleetShape, **fields: Any) -> ScalingChoice:
    return ScalingChoice(cause="slo", wanted=wanted, **{"allowed": True, "reason": "late"} | fields)
