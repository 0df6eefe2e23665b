"""Times at which plans are due, and causes as the log has them."""

from typing import Any

import pytest
from msgspec.structs import replace

from benchmarks.common.placements import placed_worker
from moesaic.messages.placement import Placement
from moesaic.messages.registry import WorkerRecord
from moesaic.services.scheduler import causes
from moesaic.services.scheduler.planning.planner import PlacementPlan
from moesaic.services.scheduler.planning.timing import AGAIN_S, STAYED_EVERY_S, PlanTimer


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("moesaic.services.scheduler.planning.timing.time.monotonic", clock)
    return clock


def placement(*worker_ids: str, epoch: int = 1, expert: int = 0) -> Placement:
    workers = [placed_worker(worker_id) for worker_id in worker_ids]
    slots = [[[expert] for _ in worker_ids]]
    return Placement(
        epoch=epoch, model_digest="m", num_experts=2, workers=workers, layers=[0], slots=slots
    )


def plan_to_stay(**fields: Any) -> PlacementPlan:
    return PlacementPlan(placement("a"), 1, "auto", "nothing better", **{"batches": 9.0, **fields})


def test_a_plan_is_due_once_each_interval(clock: Clock) -> None:
    timer = PlanTimer(60.0)

    assert not timer.due
    clock.now_s += 60
    assert timer.due
    timer.begin()
    assert not timer.due


def test_failures_double_the_interval_and_a_success_restores_it(clock: Clock) -> None:
    timer = PlanTimer(60.0)
    waits = []
    for failed in (True, True, False):
        timer.ended(failed=failed)
        began_s = clock.now_s
        while not timer.due:
            clock.now_s += 1
        waits.append(clock.now_s - began_s)

    assert waits == [120.0, 240.0, 60.0]


def test_an_interrupted_plan_is_due_again_soon(clock: Clock) -> None:
    timer = PlanTimer(60.0)
    timer.interrupted()

    clock.now_s += AGAIN_S
    assert timer.due


def test_a_plan_to_stay_is_news_once_an_epoch_and_policy_and_every_hour(clock: Clock) -> None:
    timer = PlanTimer(60.0)

    assert not timer.is_news(plan_to_stay(batches=0.0), "auto")
    assert timer.is_news(plan_to_stay(), "auto")
    assert not timer.is_news(plan_to_stay(), "auto")
    assert timer.is_news(plan_to_stay(), "eplb")
    clock.now_s += STAYED_EVERY_S
    assert timer.is_news(plan_to_stay(), "eplb")


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        (("a", "b"), ("b", "c"), "c came; a left"),
        (("a",), ("a", "b"), "b came"),
        (("a",), ("a",), "a worker was started again or forgot its placement"),
    ],
)
def test_the_log_says_which_workers_came_and_left(
    before: tuple[str, ...], after: tuple[str, ...], reason: str
) -> None:
    known = {
        worker_id: WorkerRecord(
            worker_id=worker_id,
            generation=1,
            role="expert",
            state="ready",
            admin_address="",
            expert_bytes=100,
        )
        for worker_id in after
    }

    fields = causes.by_workers(placement(*before, epoch=7), placement(*after, expert=1), known)

    assert (fields["cause"], fields["adopted"], fields["epoch_before"]) == ("workers", True, 7)
    assert fields["reason"] == reason
    assert (fields["moves"], fields["moved_bytes"]) == (len(after), 100 * len(after))


def test_the_log_says_which_agent_has_less_memory_than_before() -> None:
    agent = WorkerRecord(
        worker_id="a",
        generation=1,
        role="edge-agent",
        state="ready",
        admin_address="",
        slots_per_layer=4,
        num_experts=4,
        layers=[0],
        num_slots=1,
    )
    before = replace(placement("a", epoch=7), slots=[[[0, 1]]])

    roomy = causes.by_workers(before, before, {"a": replace(agent, num_slots=2)})
    tight = causes.by_workers(before, before, {"a": agent})

    assert roomy["reason"] == "a worker was started again or forgot its placement"
    assert tight["reason"] == "a has less room than its experts need"
