"""The workers that are activated, and those that are told to stand by."""

from moesaic.messages.placement import Placement
from moesaic.messages.registry import WorkerRecord
from moesaic.placement.decide.proposal import propose
from moesaic.services.scheduler.scaling.actuators.standby import first_to_come, first_to_spare


def expert(name: str, state: str = "ready", *, node: str = "n0", slots: int = 4) -> WorkerRecord:
    return WorkerRecord(
        worker_id=name,
        generation=1,
        role="expert",
        state=state,  # type: ignore[arg-type]
        standing_by=state in ("standby", "draining"),
        admin_address=f"{name}:1",
        node=node,
        model_digest="model-a",
        slots_per_layer=slots,
        num_experts=8,
        layers=[0, 1],
    )


def placed(*workers: WorkerRecord) -> Placement:
    placement = propose(None, workers).placement
    assert placement is not None
    return placement


def names(workers: list[WorkerRecord]) -> list[str]:
    return [worker.worker_id for worker in workers]


def test_the_lowest_worker_id_on_the_emptiest_node_comes_first() -> None:
    active = [expert("a", node="n0"), expert("b", node="n0"), expert("c", node="n1")]
    coming = [
        expert("d", "standby", node="n0"),
        expert("e", "standby", node="n1"),
        expert("f", "standby", node="n1"),
    ]

    assert names(first_to_come(active, coming, 2)) == ["e", "d"]
    assert names(first_to_come(active, coming, 9)) == ["e", "d", "f"]


def test_a_worker_that_is_on_its_way_to_standby_comes_back_before_others() -> None:
    coming = [expert("a", "standby"), expert("b", "draining")]

    assert names(first_to_come([], coming, 1)) == ["b"]


def test_the_highest_worker_id_on_the_fullest_node_leaves_first() -> None:
    workers = [expert("a", node="n0"), expert("b", node="n1"), expert("c", node="n0")]

    assert names(first_to_spare(placed(*workers), workers, workers, 1)) == ["c"]


def test_no_worker_leaves_whose_slots_are_needed() -> None:
    workers = [expert("a"), expert("b"), expert("c")]
    current = placed(*workers)

    assert names(first_to_spare(current, workers, workers, 2)) == ["c"]
    assert first_to_spare(placed(*workers[:2]), workers[:2], workers[:2], 1) == []


def test_a_large_worker_stays_where_small_ones_could_not_hold_every_expert() -> None:
    workers = [expert("a", slots=4), expert("b", slots=4), expert("c", slots=8)]

    assert names(first_to_spare(placed(*workers), workers, workers, 3)) == ["c"]
    small = [expert("a", slots=2), expert("b", slots=2), expert("c", slots=8)]
    assert names(first_to_spare(placed(*small), small, small, 3)) == ["b", "a"]


def test_workers_that_are_leaving_already_make_no_room_for_others_to_leave() -> None:
    workers = [expert("a"), expert("b"), expert("c", "draining")]
    current = placed(expert("a"), expert("b"), expert("c"))

    assert first_to_spare(current, workers, workers[:2], 1) == []
