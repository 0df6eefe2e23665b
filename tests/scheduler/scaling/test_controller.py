"""The controller around decisions: written down, carried out, and noted once, over a real Redis."""

from typing import Any

import pytest

from moesaic.cluster.registry import Fleet
from moesaic.errors import InvalidInput
from moesaic.messages.brownout import BrownoutPolicy
from moesaic.messages.scaling import FleetShape, ScalingDecision
from moesaic.services.scheduler.log import LOST
from moesaic.services.scheduler.scaling.actions import ACTION, OVERTAKEN
from moesaic.services.scheduler.scaling.controller import (
    NO_BRIDGE,
    PATIENCE_S,
)
from tests.scheduler.scaling.controlled import (
    ONE,
    THREE,
    TWO,
    Clock,
    attention_workers,
    choice,
    scheduling,
)


async def test_an_order_is_carried_out_and_its_end_is_noted(
    control: Any, fleet: Fleet, clock: Clock
) -> None:
    async with scheduling(control, fleet, clock) as scheduler:
        decision_id = await scheduler.controller.order(TWO, "because")
        ended = await scheduler.decision(lambda each: each.seconds is not None)

        assert (ended.decision_id, ended.cause, ended.adopted) == (decision_id, "operator", True)
        assert (ended.before, ended.wanted, ended.failure) == (ONE, TWO, "")
        assert scheduler.workers.wanted == [TWO]
        assert await scheduler.controller.order(TWO, "again") == ""
        with pytest.raises(InvalidInput, match=r"shape\.attention"):
            await scheduler.controller.order(FleetShape(4, 0), "too many")


async def test_in_mode_off_an_order_is_carried_out_once_and_in_auto_for_as_long_as_it_is_wanted(
    control: Any, fleet: Fleet, clock: Clock
) -> None:
    async with scheduling(control, fleet, clock) as scheduler:
        await scheduler.controller.order(TWO, "because")
        await scheduler.decision(lambda each: each.seconds is not None)

        fleet.workers = attention_workers(1)  # one has died
        scheduler.workers.wanted.clear()
        await scheduler.set(mode="advise")
        await scheduler.until(lambda: bool(scheduler.choices.asked))
        assert scheduler.workers.wanted == []

        await scheduler.set(mode="auto")
        await scheduler.until(lambda: scheduler.workers.wanted == [TWO])


async def test_advice_is_told_once_and_changes_nothing(
    control: Any, fleet: Fleet, clock: Clock
) -> None:
    async with scheduling(control, fleet, clock) as scheduler:
        scheduler.choices.choice = choice(TWO)
        await scheduler.set(mode="advise")
        advice = await scheduler.decision(lambda each: True)
        await scheduler.until(lambda: len(scheduler.choices.asked) >= 3, passing_s=1.0)

        assert (advice.wanted, advice.adopted) == (TWO, False)
        assert len(scheduler.log.recent_scaling(10)) == 1
        assert (scheduler.actions.action, scheduler.workers.wanted) == (None, [])


async def test_what_is_held_back_is_told_with_its_reason(
    control: Any, fleet: Fleet, clock: Clock
) -> None:
    async with scheduling(control, fleet, clock) as scheduler:
        scheduler.choices.choice = choice(TWO, allowed=False, held="cooling down")
        await scheduler.set(mode="auto")
        held = await scheduler.decision(lambda each: True)

        assert (held.adopted, held.reason) == (False, "late; cooling down")
        assert scheduler.actions.action is None


@pytest.mark.parametrize("mode", ["off", "manual"])  # by hand, thresholds are one unless set
async def test_a_choice_is_carried_out_and_says_whether_anything_bridges_the_time(
    control: Any, fleet: Fleet, clock: Clock, mode: Any
) -> None:
    async with scheduling(control, fleet, clock) as scheduler:
        await scheduler.brownout.change(lambda before: BrownoutPolicy(mode=mode))
        scheduler.choices.choice = choice(TWO, bridged=True)
        await scheduler.set(mode="auto")
        first = await scheduler.decision(lambda each: each.seconds is not None)
        await scheduler.brownout.change(
            lambda before: BrownoutPolicy(mode="manual", decode_threshold=0.5)
        )
        scheduler.choices.choice = choice(THREE, bridged=True)
        clock.now += 100
        second = await scheduler.decision(
            lambda each: each.wanted == THREE and each.seconds is not None
        )

        assert (first.adopted, first.bridged, first.reason) == (True, False, f"late; {NO_BRIDGE}")
        assert (second.reason, second.decode_threshold) == ("late", 0.5)
        assert scheduler.actions.action is not None
        assert (scheduler.actions.action.number, scheduler.actions.action.up) == (2, True)


async def test_an_order_that_is_overtaken_or_never_there_has_failed(
    control: Any, fleet: Fleet, clock: Clock
) -> None:
    async with scheduling(control, fleet, clock) as scheduler:
        scheduler.workers.failing = "the host is full"
        first = await scheduler.controller.order(TWO, "because")
        second = await scheduler.controller.order(THREE, "because")
        overtaken = await scheduler.decision(lambda each: bool(each.failure))
        await scheduler.until(lambda: scheduler.controller.trouble == "the host is full")

        clock.now += PATIENCE_S + 1
        failed = await scheduler.decision(
            lambda each: each.decision_id == second and bool(each.failure)
        )

        assert (overtaken.decision_id, overtaken.failure) == (first, OVERTAKEN)
        assert failed.failure == "the host is full"


async def test_the_next_leader_goes_on_from_the_action_and_ends_what_nobody_began(
    control: Any, fleet: Fleet, clock: Clock
) -> None:
    async with scheduling(control, fleet, clock) as first:
        first.workers.brings = False
        ordered = await first.controller.order(TWO, "because")
        await first.until(lambda: first.workers.wanted == [TWO])
        # One that was logged, and never became the action.
        lost = ScalingDecision(decision_id="lost", adopted=True, before=ONE, wanted=THREE)
        await first.log.note_scaling(lost)

    async with scheduling(control, fleet, clock, "s1") as second:
        ended = await second.decision(lambda each: each.seconds is not None)
        assert ended.decision_id == ordered
        assert second.workers.wanted == [TWO]
        assert second.actions.action is not None
        assert second.actions.action.number == 1
        found = await second.decision(
            lambda each: each.decision_id == "lost" and bool(each.failure)
        )
        assert found.failure == LOST


async def test_the_policy_and_the_action_are_put_back_where_redis_has_lost_them(
    control: Any, fleet: Fleet, clock: Clock
) -> None:
    async with scheduling(control, fleet, clock) as scheduler:
        await scheduler.set(mode="auto", max_attention=2)
        await scheduler.controller.order(TWO, "because")
        await scheduler.decision(lambda each: each.seconds is not None)
        action = scheduler.actions.action

        await control.bus.connection.client.flushall()
        while await control.bus.get_bytes(ACTION) is None:
            await scheduler.looks.next()

        await scheduler.actions.keep()
        assert scheduler.actions.action == action
        assert (scheduler.policy.current.mode, scheduler.policy.current.max_attention) == (
            "auto",
            2,
        )
