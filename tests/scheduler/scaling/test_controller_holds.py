"""Cases in which the controller must hold, go on, or say what is amiss."""

from typing import Any

import pytest

from moesaic.cluster.registry import Fleet
from moesaic.errors import InvalidInput, NotReady
from moesaic.messages.performance import LoadReport, RequestLatency
from moesaic.messages.registry import WorkerRecord
from moesaic.messages.scaling import FleetShape
from moesaic.scaling.contract import ScalingState
from tests.scheduler.scaling.controlled import (
    ONE,
    THREE,
    TWO,
    Clock,
    Scheduler,
    attention_workers,
    choice,
    scheduling,
)


async def test_an_order_that_is_repeated_while_it_is_under_way_is_the_same_one(
    control: Any, fleet: Fleet, clock: Clock
) -> None:
    async with scheduling(control, fleet, clock) as scheduler:
        scheduler.workers.brings = False
        first = await scheduler.controller.order(TWO, "because")

        assert await scheduler.controller.order(TWO, "again") == first
        assert await scheduler.controller.order(ONE, "no, stay") not in ("", first)


async def test_an_order_leaves_mode_auto_before_its_action_can_be_seen(
    control: Any, fleet: Fleet, clock: Clock
) -> None:
    async with scheduling(control, fleet, clock) as scheduler:
        await scheduler.set(mode="auto")
        with pytest.raises(InvalidInput):
            await scheduler.controller.order(FleetShape(9, 0), "too many", keep_mode=False)
        assert scheduler.policy.current.mode == "auto"

        actions: list[str] = []
        wanted = scheduler.actions.want

        async def want(*arguments: Any) -> Any:
            actions.append(scheduler.policy.current.mode)
            return await wanted(*arguments)

        scheduler.actions.want = want  # type: ignore[method-assign]
        await scheduler.controller.order(TWO, "because", keep_mode=False)

        assert actions == ["advise"]


async def test_advice_during_a_cool_down_is_told_once_though_its_seconds_pass(
    control: Any, fleet: Fleet, clock: Clock
) -> None:
    async with scheduling(control, fleet, clock) as scheduler:
        scheduler.choices.choice = choice(TWO, allowed=False, held="0 s of 60 s")
        await scheduler.set(mode="auto")
        while len(scheduler.choices.asked) < 4:
            clock.now += 1
            held = f"{len(scheduler.choices.asked)} s of 60 s"
            scheduler.choices.choice = choice(TWO, allowed=False, held=held)
            await scheduler.looks.next()

        assert len(scheduler.log.recent_scaling(10)) == 1


@pytest.mark.parametrize("part", ["workers", "choices"])
async def test_an_error_of_a_part_is_a_trouble_and_no_end(
    control: Any, fleet: Fleet, clock: Clock, part: str
) -> None:
    async with scheduling(control, fleet, clock) as scheduler:
        getattr(scheduler, part).broken = OverflowError("too large")
        await scheduler.set(mode="auto")
        decision_id = await scheduler.controller.order(TWO, "because")
        await scheduler.until(lambda: scheduler.controller.trouble == "too large", passing_s=1.0)

        getattr(scheduler, part).broken = None
        ended = await scheduler.decision(lambda each: each.seconds is not None)
        await scheduler.until(lambda: not scheduler.controller.trouble, passing_s=1.0)
        assert ended.decision_id == decision_id


async def test_without_an_action_choices_go_on_from_what_the_actuator_is_set_to(
    control: Any, fleet: Fleet, clock: Clock
) -> None:
    async with scheduling(control, fleet, clock) as scheduler:
        scheduler.workers.set_to = THREE  # two have crashed, and will be back
        await scheduler.set(mode="auto")
        await scheduler.until(lambda: bool(scheduler.choices.asked))

        assert (scheduler.choices.asked[-1].shape, scheduler.choices.asked[-1].intended) == (
            ONE,
            THREE,
        )


async def test_only_what_ended_after_the_last_action_is_measured(
    control: Any, fleet: Fleet, clock: Clock
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
        await scheduler.until(lambda: bool(scheduler.choices.asked), passing_s=1.0)
        return scheduler.choices.asked[-1]

    async with scheduling(control, fleet, clock) as scheduler:
        scheduler.feed.take(late(clock.now))
        await scheduler.set(mode="advise", window_s=3600)
        assert (await asked(scheduler)).attainment == 0.0

        clock.now += 2
        await scheduler.controller.order(TWO, "because")
        await scheduler.decision(lambda each: each.seconds is not None)
        assert (await asked(scheduler)).attainment is None
        scheduler.feed.take(late(clock.now + 2))
        assert (await asked(scheduler)).attainment == 0.0


async def test_an_action_for_too_few_expert_workers_is_not_carried_out(
    control: Any, fleet: Fleet, clock: Clock
) -> None:
    async with scheduling(control, fleet, clock) as scheduler:
        await scheduler.controller.order(TWO, "because")
        await scheduler.decision(lambda each: each.seconds is not None)
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
        needed = "2A0E is wanted, but 2 expert workers are needed"
        await scheduler.until(lambda: needed in scheduler.controller.trouble)
        with pytest.raises(NotReady, match="it takes 2 expert workers"):
            await scheduler.controller.order(TWO, "again")

        assert scheduler.workers.wanted == []
