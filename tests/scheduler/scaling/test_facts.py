"""Facts about the fleet that numbers of workers are decided from."""

from typing import Any

import pytest

from moesaic.cluster.registry import Fleet
from moesaic.errors import NotReady
from moesaic.messages.brownout import BrownoutDecision, BrownoutInputs, BrownoutPolicy
from moesaic.messages.placement import Placement
from moesaic.messages.registry import WorkerRecord
from moesaic.messages.scaling import FleetShape, ScalingPolicy
from moesaic.placement.decide.proposal import propose
from moesaic.services.scheduler.scaling.facts import (
    active_shape,
    fewest_expert_workers,
    is_there,
    objectives_of,
    shape_bounds,
    thresholds_now,
)


def worker(name: str, role: str = "expert", state: str = "ready", **fields: Any) -> WorkerRecord:
    known: dict[str, Any] = {
        "slots_per_layer": 4,
        "num_experts": 8,
        "layers": [0],
        "model_digest": "m",
    }
    return WorkerRecord(
        worker_id=name,
        generation=1,
        role=role,  # type: ignore[arg-type]
        state=state,  # type: ignore[arg-type]
        admin_address=f"{name}:1",
        **(known if role == "expert" else {}) | fields,
    )


def fleet_of(*workers: WorkerRecord) -> Fleet:
    fleet = Fleet()
    fleet.workers = {record.worker_id: record for record in workers}
    return fleet


def placement_of(*workers: WorkerRecord) -> Placement:
    placement = propose(None, workers).placement
    assert placement is not None
    return placement


def test_only_workers_that_take_work_are_counted() -> None:
    fleet = fleet_of(
        worker("a0", "attention"),
        worker("a1", "attention", "standby"),
        worker("a2", "attention", "draining"),
        worker("e0"),
        worker("e1", state="starting"),
        worker("g", "gateway"),
        worker("s", "edge-agent"),
    )

    assert active_shape(fleet) == FleetShape(1, 1)


def test_a_shape_is_there_once_its_expert_workers_are_placed_and_nobody_is_leaving() -> None:
    a, e0, e1 = worker("a0", "attention"), worker("e0"), worker("e1")
    wanted = FleetShape(1, 2)

    assert not is_there(wanted, fleet_of(a, e0), placement_of(e0, e1))
    assert is_there(wanted, fleet_of(a, e0, e1), placement_of(e0, e1))
    assert not is_there(wanted, fleet_of(a, e0, e1, worker("e2")), placement_of(e0, e1))
    e2 = worker("e2", state="draining", standing_by=True)
    assert not is_there(wanted, fleet_of(a, e0, e1, e2), placement_of(e0, e1, worker("e2")))
    assert not is_there(wanted, fleet_of(a, e0, e1, e2), placement_of(e0, e1))
    resting = worker("e2", state="standby", standing_by=True)
    assert is_there(wanted, fleet_of(a, e0, e1, resting), placement_of(e0, e1))


def test_expert_workers_must_have_room_for_every_expert() -> None:
    small = [worker(f"e{n}", slots_per_layer=3) for n in range(5)]

    assert fewest_expert_workers(small) == 3
    assert fewest_expert_workers([*small, worker("big", slots_per_layer=8)]) == 1
    assert fewest_expert_workers([*small, worker("big", slots_per_layer=8, drained=True)]) == 3
    bounds = shape_bounds(ScalingPolicy(), FleetShape(4, 5), small)
    assert (bounds.least, bounds.most) == (FleetShape(1, 3), FleetShape(4, 5))


def test_workers_that_have_not_registered_yet_are_needed_too() -> None:
    assert fewest_expert_workers([worker("e0", slots_per_layer=1)]) == 8
    assert fewest_expert_workers([worker("e0", slots_per_layer=3)]) == 3
    assert fewest_expert_workers([]) == 0


@pytest.mark.parametrize(
    ("policy", "most", "told"),
    [
        (
            ScalingPolicy(max_experts=2),
            FleetShape(4, 8),
            "the policy allows 2: raise its max_experts",
        ),
        (ScalingPolicy(), FleetShape(4, 3), "the actuator can bring 3"),
    ],
)
def test_bounds_that_leave_experts_without_a_worker_are_refused(
    policy: ScalingPolicy, most: FleetShape, told: str
) -> None:
    experts = [worker(f"e{n}", slots_per_layer=1) for n in range(8)]

    with pytest.raises(NotReady, match=told):
        shape_bounds(policy, most, experts)


def test_a_worker_that_operators_drain_does_not_keep_a_shape_from_being_there() -> None:
    a, e0, e1 = worker("a0", "attention"), worker("e0"), worker("e1")
    drained = worker("e2", state="draining", standing_by=True, drained=True)

    assert is_there(FleetShape(1, 2), fleet_of(a, e0, e1, drained), placement_of(e0, e1))


def test_bounds_are_those_of_the_policy_as_far_as_there_are_workers() -> None:
    policy = ScalingPolicy(min_attention=3, max_attention=9, min_experts=2, max_experts=4)
    experts = [worker(f"e{n}") for n in range(8)]

    assert shape_bounds(policy, FleetShape(6, 8), experts).most == FleetShape(6, 4)
    assert shape_bounds(policy, FleetShape(6, 8), experts).least == FleetShape(3, 2)
    assert shape_bounds(policy, FleetShape(2, 0), []).least == FleetShape(2, 0)


def test_targets_are_those_of_brownout_unless_the_policy_has_its_own() -> None:
    brownout = BrownoutPolicy(slo_ttft_s=1.0, slo_tpot_s=0.2)

    found = objectives_of(ScalingPolicy(slo_tpot_s=0.1, attainment=0.95), brownout)

    assert (found.ttft_s, found.tpot_s, found.attainment) == (1.0, 0.1, 0.95)


@pytest.mark.parametrize(
    ("mode", "thresholds"), [("off", (1.0, 1.0)), ("manual", (0.8, 0.9)), ("auto", (0.25, 0.5))]
)
def test_thresholds_are_the_least_of_any_worker_that_is_there(
    mode: Any, thresholds: tuple[float, float]
) -> None:
    def decided(worker_id: str, prefill: float, generation: int = 1) -> BrownoutDecision:
        return BrownoutDecision(
            number=1,
            worker_id=worker_id,
            generation=generation,
            at=1.0,
            reason="",
            mode="auto",
            prefill=prefill,
            decode=0.5,
            inputs=BrownoutInputs(),
        )

    policy = BrownoutPolicy(mode=mode, prefill_threshold=0.8, decode_threshold=0.9)
    newest_first = [
        decided("a0", 0.5),
        decided("a1", 0.25),
        decided("a1", 0.0),
        decided("gone", 0.0),
        decided("a0", 0.0, generation=0),
    ]
    there = {name: worker(name, "attention") for name in ("a0", "a1")}

    assert thresholds_now(policy, newest_first, there) == thresholds
