"""The steps of the loop that decides about the placement: each alone, and which goes first."""

from typing import Any

import pytest
from msgspec.structs import replace

from moesaic.messages.decisions import Pin
from moesaic.messages.placement import PlacedWorker, Placement
from moesaic.messages.registry import WorkerRecord
from moesaic.messages.substitution import Substitution
from moesaic.placement.decide.proposal import Proposal
from moesaic.services.scheduler.steps import (
    ConfirmStep,
    PlaceStep,
    PlanStep,
    Situation,
    change_substitution,
    confirm,
    go_ahead_of_workers,
    next_step,
    place_pins,
    rebalance,
    settle_workers,
)

PAIRS = Substitution(way=2, instead="united")


def placement(*held: list[int], epoch: int = 3) -> Placement:
    workers = [
        PlacedWorker(worker_id=f"w{n}", generation=1, admin_address="", data_address="")
        for n in range(len(held))
    ]
    return Placement(
        epoch=epoch,
        model_digest="m",
        num_experts=4,
        workers=workers,
        layers=[0],
        slots=[list(held)],
    )


CURRENT = placement([0, 1, -1], [2, 3, -1])
PROPOSED = placement([0, 1, 2], [3, -1, -1], epoch=0)


def worker(worker_id: str) -> WorkerRecord:
    return WorkerRecord(
        worker_id=worker_id,
        generation=1,
        role="expert",
        state="ready",
        admin_address="",
        model_digest="m",
        slots_per_layer=3,
        num_experts=4,
        layers=[0],
    )


def situation(**changes: Any) -> Situation:
    """Nothing is to be done, unless ``changes`` say so."""
    nothing: dict[str, Any] = {
        "current": CURRENT,
        "proposal": Proposal(),
        "workers": {name: worker(name) for name in ("w0", "w1")},
        "pins": [],
        "pins_tried": False,
        "substitution": Substitution(),
        "may_change": True,
        "unconfirmed": False,
        "went_back": False,
        "plan_due": False,
    }
    return Situation(**nothing | changes)


def pinned(expert: int = 3, worker_id: str = "w0") -> dict[str, Any]:
    return {"pins": [Pin(layer=0, expert=expert, worker_id=worker_id)]}


# What calls for each step, the first one first.
CALLS: list[tuple[dict[str, Any], type, str]] = [
    ({"proposal": Proposal(placement=PROPOSED, urgent=True)}, PlaceStep, "workers"),
    ({"went_back": True}, PlaceStep, "workers"),
    ({"unconfirmed": True}, ConfirmStep, ""),
    ({"substitution": PAIRS}, PlaceStep, "operator"),
    (pinned(), PlaceStep, "operator"),
    ({"plan_due": True}, PlanStep, ""),
]


def test_where_nothing_calls_for_a_step_there_is_none() -> None:
    assert next_step(situation()) is None
    assert next_step(situation(current=None)) is None


@pytest.mark.parametrize("first", range(len(CALLS)))
def test_the_first_step_that_is_called_for_is_taken_whatever_else_is(first: int) -> None:
    changes: dict[str, Any] = {}
    for call, _, _ in CALLS[first:]:
        changes |= call
    step = next_step(situation(**changes))

    _, kind, cause = CALLS[first]
    alone = next_step(situation(**CALLS[first][0]))
    assert isinstance(step, kind)
    assert isinstance(alone, kind)
    if isinstance(step, PlaceStep):
        assert step.cause["cause"] == cause


def test_a_proposal_that_can_wait_does_and_pins_are_part_of_it() -> None:
    proposal = Proposal(placement=PROPOSED)
    waiting = situation(proposal=proposal, may_change=False, **pinned())

    assert settle_workers(waiting) is None
    assert next_step(waiting) is None  # nothing overtakes it
    step = settle_workers(situation(proposal=proposal, **pinned(0, "w1")))
    assert step is not None
    assert not step.urgent
    assert step.wanted.slots == [[[0, 1, 2], [3, 0, -1]]]


def test_what_is_urgent_does_not_wait() -> None:
    step = settle_workers(
        situation(proposal=Proposal(placement=PROPOSED, urgent=True), may_change=False)
    )

    assert step is not None
    assert (step.urgent, step.wanted.slots) == (True, PROPOSED.slots)


def test_a_redis_that_went_back_gets_the_same_placement_under_a_new_epoch() -> None:
    step = go_ahead_of_workers(situation(went_back=True))

    assert step is not None
    assert step.urgent
    assert step.wanted == replace(CURRENT, epoch=0)


@pytest.mark.parametrize("unsettled", [{"unconfirmed": True}, {"went_back": True}])
def test_nothing_else_changes_before_workers_have_the_placement(unsettled: Any) -> None:
    now = situation(substitution=PAIRS, plan_due=True, **pinned(), **unsettled)

    assert (change_substitution(now), place_pins(now), rebalance(now)) == (None, None, None)
    assert confirm(situation(unconfirmed=True, current=None)) is None


def test_another_substitution_needs_no_wait_and_goes_before_pins_and_plans() -> None:
    now = situation(substitution=PAIRS, may_change=False, plan_due=True, **pinned())

    step = change_substitution(now)
    assert step is not None
    assert step.wanted.num_united == 2
    assert (place_pins(now), rebalance(now)) == (None, None)


def test_pins_are_tried_once_and_those_that_cannot_be_had_are_left() -> None:
    step = place_pins(situation(**pinned()))

    assert step is not None
    assert step.wanted.slots == [[[0, 1, 3], [2, 3, -1]]]
    assert place_pins(situation(pins_tried=True, **pinned())) is None
    assert place_pins(situation(**pinned(worker_id="nobody"))) is None


def test_plans_are_for_the_models_own_experts_and_wait_their_turn() -> None:
    united = replace(CURRENT, substitution=Substitution(instead="fewer"))
    now = situation(current=united, substitution=united.substitution, plan_due=True)

    assert rebalance(now) == PlanStep(CURRENT)
    assert rebalance(situation(plan_due=True, may_change=False)) is None
