"""The controller around decisions: written down, carried out, and noted once, over a real Redis."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from moesaic.cluster.leadership import leadership
from moesaic.cluster.registry import Fleet
from moesaic.errors import InvalidInput, NotReady
from moesaic.messages.brownout import BrownoutPolicy
from moesaic.messages.performance import LoadReport, RequestLatency
from moesaic.messages.registry import WorkerRecord
from moesaic.messages.scaling import FleetShape, ScalingDecision, ScalingPolicy
from moesaic.scaling.contract import RecentDemand, ScalingChoice, ScalingState
from moesaic.services.scheduler.brownout import BrownoutStore
from moesaic.services.scheduler.epochs.store import EpochStore
from moesaic.services.scheduler.log import LOST, DecisionLog
from moesaic.services.scheduler.scaling.controller import (
    NO_BRIDGE,
    PATIENCE_S,
    ScalingController,
    ScalingParts,
)
from moesaic.services.scheduler.scaling.facts import active_shape
from moesaic.services.scheduler.scaling.feed import LoadFeed
from moesaic.services.scheduler.scaling.store import OVERTAKEN, ScalingStore

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


class Scheduler:
    """One scheduler's part in scaling."""

    def __init__(self, bus: Any, view: Any, lead: Any, fleet: Fleet, clock: Clock) -> None:
        epochs = EpochStore(bus, lead, view)
        self.store = ScalingStore(bus, epochs, lead, ScalingPolicy(interval_s=0.5), clock)
        self.brownout = BrownoutStore(bus, epochs, lead, BrownoutPolicy())
        self.log = DecisionLog(bus, clock)
        self.workers, self.choices = Workers(fleet), Choices()
        self.feed = LoadFeed(bus, lead, clock)
        self.controller = ScalingController(
            ScalingParts(
                fleet,
                view,
                lead,
                self.store,
                self.feed,
                self.choices,
                self.log,
                self.brownout,
                self.workers,
            ),
            clock,
        )

    async def set(self, **changes: Any) -> None:
        await self.store.change(lambda before: ScalingPolicy(**{"interval_s": 0.5} | changes))

    async def until(self, found: Callable[[ScalingDecision], bool]) -> ScalingDecision:
        """Wait for a decision in the log."""
        while True:
            for decision in self.log.recent_scaling(10):
                if found(decision):
                    return decision
            await asyncio.sleep(0.01)


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


@pytest.fixture
def fleet() -> Fleet:
    fleet = Fleet()
    fleet.workers, fleet.stale = attention_workers(1), False
    return fleet


@pytest.fixture
def clock() -> Clock:
    return Clock()


def choice(wanted: FleetShape, **fields: Any) -> ScalingChoice:
    return ScalingChoice(cause="slo", wanted=wanted, **{"allowed": True, "reason": "late"} | fields)


async def test_an_order_is_carried_out_and_its_end_is_noted(
    suite: Any, fleet: Fleet, clock: Clock
) -> None:
    async with scheduling(suite, fleet, clock) as scheduler:
        decision_id = await scheduler.controller.order(TWO, "because")
        ended = await scheduler.until(lambda each: each.seconds is not None)

        assert (ended.decision_id, ended.cause, ended.adopted) == (decision_id, "operator", True)
        assert (ended.before, ended.wanted, ended.failure) == (ONE, TWO, "")
        assert scheduler.workers.wanted == [TWO]
        assert await scheduler.controller.order(TWO, "again") == ""
        with pytest.raises(InvalidInput, match=r"shape\.attention"):
            await scheduler.controller.order(FleetShape(4, 0), "too many")


async def test_in_mode_off_an_order_is_carried_out_once_and_in_auto_for_as_long_as_it_is_wanted(
    suite: Any, fleet: Fleet, clock: Clock
) -> None:
    async with scheduling(suite, fleet, clock) as scheduler:
        await scheduler.controller.order(TWO, "because")
        await scheduler.until(lambda each: each.seconds is not None)

        fleet.workers = attention_workers(1)  # one has died
        scheduler.workers.wanted.clear()
        await scheduler.set(mode="advise")
        while not scheduler.choices.asked:
            await asyncio.sleep(0.01)
        assert scheduler.workers.wanted == []

        await scheduler.set(mode="auto")
        while scheduler.workers.wanted != [TWO]:
            await asyncio.sleep(0.01)


async def test_advice_is_told_once_and_changes_nothing(
    suite: Any, fleet: Fleet, clock: Clock
) -> None:
    async with scheduling(suite, fleet, clock) as scheduler:
        scheduler.choices.choice = choice(TWO)
        await scheduler.set(mode="advise")
        advice = await scheduler.until(lambda each: True)
        while len(scheduler.choices.asked) < 3:
            clock.now += 1
            await asyncio.sleep(0.01)

        assert (advice.wanted, advice.adopted) == (TWO, False)
        assert len(scheduler.log.recent_scaling(10)) == 1
        assert (scheduler.store.wish, scheduler.workers.wanted) == (None, [])


async def test_what_is_held_back_is_told_with_its_reason(
    suite: Any, fleet: Fleet, clock: Clock
) -> None:
    async with scheduling(suite, fleet, clock) as scheduler:
        scheduler.choices.choice = choice(TWO, allowed=False, held="cooling down")
        await scheduler.set(mode="auto")
        held = await scheduler.until(lambda each: True)

        assert (held.adopted, held.reason) == (False, "late; cooling down")
        assert scheduler.store.wish is None


async def test_a_choice_is_carried_out_and_says_whether_anything_bridges_the_time(
    suite: Any, fleet: Fleet, clock: Clock
) -> None:
    async with scheduling(suite, fleet, clock) as scheduler:
        scheduler.choices.choice = choice(TWO, bridged=True)
        await scheduler.set(mode="auto")
        first = await scheduler.until(lambda each: each.seconds is not None)
        await scheduler.brownout.change(
            lambda before: BrownoutPolicy(mode="manual", decode_threshold=0.5)
        )
        scheduler.choices.choice = choice(THREE, bridged=True)
        clock.now += 100
        second = await scheduler.until(
            lambda each: each.wanted == THREE and each.seconds is not None
        )

        assert (first.adopted, first.bridged, first.reason) == (True, True, f"late; {NO_BRIDGE}")
        assert (second.reason, second.decode_threshold) == ("late", 0.5)
        assert scheduler.store.wish is not None
        assert (scheduler.store.wish.number, scheduler.store.wish.up) == (2, True)


async def test_an_order_that_is_overtaken_or_never_there_has_failed(
    suite: Any, fleet: Fleet, clock: Clock
) -> None:
    async with scheduling(suite, fleet, clock) as scheduler:
        scheduler.workers.failing = "the host is full"
        first = await scheduler.controller.order(TWO, "because")
        second = await scheduler.controller.order(THREE, "because")
        overtaken = await scheduler.until(lambda each: bool(each.failure))
        while scheduler.controller.trouble != "the host is full":
            await asyncio.sleep(0.01)

        clock.now += PATIENCE_S + 1
        failed = await scheduler.until(
            lambda each: each.decision_id == second and bool(each.failure)
        )

        assert (overtaken.decision_id, overtaken.failure) == (first, OVERTAKEN)
        assert failed.failure == "the host is full"


async def test_the_next_leader_goes_on_from_the_wish_and_ends_what_nobody_began(
    suite: Any, fleet: Fleet, clock: Clock
) -> None:
    async with scheduling(suite, fleet, clock) as first:
        first.workers.brings = False
        ordered = await first.controller.order(TWO, "because")
        while first.workers.wanted != [TWO]:
            await asyncio.sleep(0.01)
        # One that was logged, and never became the wish.
        lost = ScalingDecision(decision_id="lost", adopted=True, before=ONE, wanted=THREE)
        await first.log.note_scaling(lost)

    async with scheduling(suite, fleet, clock, "s1") as second:
        ended = await second.until(lambda each: each.seconds is not None)
        assert ended.decision_id == ordered
        assert second.workers.wanted == [TWO]
        assert second.store.wish is not None
        assert second.store.wish.number == 1
        found = await second.until(lambda each: each.decision_id == "lost" and bool(each.failure))
        assert found.failure == LOST


async def test_the_policy_and_the_wish_are_put_back_where_redis_has_lost_them(
    suite: Any, fleet: Fleet, clock: Clock
) -> None:
    async with scheduling(suite, fleet, clock) as scheduler:
        await scheduler.set(mode="auto", max_attention=2)
        await scheduler.controller.order(TWO, "because")
        await scheduler.until(lambda each: each.seconds is not None)
        wish = scheduler.store.wish

        await suite.bus.connection.client.flushall()
        while await suite.bus.get_bytes("scaling:wish") is None:
            await asyncio.sleep(0.01)

        await scheduler.store.refresh()
        assert scheduler.store.wish == wish
        assert (scheduler.store.policy.mode, scheduler.store.policy.max_attention) == ("auto", 2)


async def test_an_order_that_is_repeated_while_it_is_under_way_is_the_same_one(
    suite: Any, fleet: Fleet, clock: Clock
) -> None:
    async with scheduling(suite, fleet, clock) as scheduler:
        scheduler.workers.brings = False
        first = await scheduler.controller.order(TWO, "because")

        assert await scheduler.controller.order(TWO, "again") == first
        assert await scheduler.controller.order(ONE, "no, stay") not in ("", first)


async def test_an_order_leaves_mode_auto_before_its_wish_can_be_seen(
    suite: Any, fleet: Fleet, clock: Clock
) -> None:
    async with scheduling(suite, fleet, clock) as scheduler:
        await scheduler.set(mode="auto")
        with pytest.raises(InvalidInput):
            await scheduler.controller.order(FleetShape(9, 0), "too many", keep_mode=False)
        assert scheduler.store.policy.mode == "auto"

        wishes: list[str] = []
        wanted = scheduler.store.want

        async def want(*arguments: Any) -> Any:
            wishes.append(scheduler.store.policy.mode)
            return await wanted(*arguments)

        scheduler.store.want = want  # type: ignore[method-assign]
        await scheduler.controller.order(TWO, "because", keep_mode=False)

        assert wishes == ["advise"]


async def test_advice_during_a_cool_down_is_told_once_though_its_seconds_pass(
    suite: Any, fleet: Fleet, clock: Clock
) -> None:
    async with scheduling(suite, fleet, clock) as scheduler:
        scheduler.choices.choice = choice(TWO, allowed=False, held="0 s of 60 s")
        await scheduler.set(mode="auto")
        while len(scheduler.choices.asked) < 4:
            clock.now += 1
            held = f"{len(scheduler.choices.asked)} s of 60 s"
            scheduler.choices.choice = choice(TWO, allowed=False, held=held)
            await asyncio.sleep(0.01)

        assert len(scheduler.log.recent_scaling(10)) == 1


@pytest.mark.parametrize("part", ["workers", "choices"])
async def test_an_error_of_a_part_is_a_trouble_and_no_end(
    suite: Any, fleet: Fleet, clock: Clock, part: str
) -> None:
    async with scheduling(suite, fleet, clock) as scheduler:
        getattr(scheduler, part).broken = OverflowError("too large")
        await scheduler.set(mode="auto")
        decision_id = await scheduler.controller.order(TWO, "because")
        while scheduler.controller.trouble != "too large":
            clock.now += 1
            await asyncio.sleep(0.01)

        getattr(scheduler, part).broken = None
        ended = await scheduler.until(lambda each: each.seconds is not None)
        while scheduler.controller.trouble:
            clock.now += 1
            await asyncio.sleep(0.01)
        assert ended.decision_id == decision_id


async def test_without_a_wish_choices_go_on_from_what_the_actuator_is_set_to(
    suite: Any, fleet: Fleet, clock: Clock
) -> None:
    async with scheduling(suite, fleet, clock) as scheduler:
        scheduler.workers.set_to = THREE  # two have crashed, and will be back
        await scheduler.set(mode="auto")
        while not scheduler.choices.asked:
            await asyncio.sleep(0.01)

        assert (scheduler.choices.asked[-1].shape, scheduler.choices.asked[-1].intended) == (
            ONE,
            THREE,
        )


async def test_only_what_ended_after_the_last_action_is_measured(
    suite: Any, fleet: Fleet, clock: Clock
) -> None:
    def late(at: float) -> LoadReport:
        return LoadReport(
            worker_id="attention-0",
            generation=1,
            role="attention",
            at=at,
            window_s=1.0,
            latencies=[RequestLatency(99.0)],
            ended=50,
        )

    async def asked(scheduler: Scheduler) -> ScalingState:
        scheduler.choices.asked.clear()
        while not scheduler.choices.asked:
            clock.now += 1
            await asyncio.sleep(0.01)
        return scheduler.choices.asked[-1]

    async with scheduling(suite, fleet, clock) as scheduler:
        scheduler.feed.take(late(clock.now))
        await scheduler.set(mode="advise", window_s=3600)
        assert (await asked(scheduler)).attainment == 0.0

        clock.now += 2
        await scheduler.controller.order(TWO, "because")
        await scheduler.until(lambda each: each.seconds is not None)
        assert (await asked(scheduler)).attainment is None
        scheduler.feed.take(late(clock.now + 2))
        assert (await asked(scheduler)).attainment == 0.0


async def test_a_wish_for_too_few_expert_workers_is_not_carried_out(
    suite: Any, fleet: Fleet, clock: Clock
) -> None:
    async with scheduling(suite, fleet, clock) as scheduler:
        await scheduler.controller.order(TWO, "because")
        await scheduler.until(lambda each: each.seconds is not None)
        expert = {"slots_per_layer": 4, "num_experts": 8, "layers": [0]}
        fleet.workers = attention_workers(2) | {
            name: WorkerRecord(
                worker_id=name,
                generation=1,
                role="expert",
                state="ready",
                admin_address=f"{name}:1",
                **expert,  # type: ignore[arg-type]
            )
            for name in ("expert-0", "expert-1")
        }
        scheduler.workers.wanted.clear()
        await scheduler.set(mode="auto")
        while "2A0E is wanted, but 2 expert workers are needed" not in scheduler.controller.trouble:
            await asyncio.sleep(0.01)
        with pytest.raises(NotReady, match="it takes 2 expert workers"):
            await scheduler.controller.order(TWO, "again")

        assert scheduler.workers.wanted == []
