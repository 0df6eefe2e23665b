from msgspec.structs import replace

from benchmarks.common.placements import placed_worker
from moesaic.messages.placement import Placement
from moesaic.messages.substitution import Substitution
from moesaic.placement.decide.coverage import missing_experts, unserved_experts


def placed(slots: list[list[list[int]]]) -> Placement:
    return Placement(
        epoch=1,
        model_digest="d",
        num_experts=4,
        workers=[placed_worker(name) for name in ("a", "b")],
        layers=[1, 3],
        slots=slots,
    )


def test_experts_are_missing_only_where_every_holder_is_gone():
    placement = placed([[[0, 1, 2], [2, 3, 0]], [[0, 1, 2, 3], [-1, 3]]])

    assert missing_experts(placement, {("a", 1), ("b", 1)}) == {}
    assert missing_experts(placement, {("a", 1)}) == {1: [3]}
    assert missing_experts(placement, {("b", 1)}) == {1: [1], 3: [0, 1, 2]}


def test_a_restarted_worker_holds_nothing_of_the_placement():
    placement = placed([[[0, 1, 2, 3], [-1]], [[0, 1], [2, 3]]])

    assert missing_experts(placement, {("a", 2), ("b", 1)}) == {1: [0, 1, 2, 3], 3: [0, 1]}


def test_experts_are_served_by_what_stands_in_for_them() -> None:
    workers = [placed_worker(name) for name in ("a", "b")]
    placement = Placement(
        epoch=1,
        model_digest="m",
        num_experts=6,
        num_united=2,
        substitution=Substitution(way=2, instead="united"),
        workers=workers,
        layers=[3],
        slots=[[[0, 1, 5], [2, 3, 4]]],
    )

    assert missing_experts(placement, {("a", 1)}) == {3: [2, 3, 4]}
    assert unserved_experts(placement, {("a", 1)}) == {}
    assert unserved_experts(placement, set()) == {3: [0, 1, 2, 3]}
    both = [[[0, 1], [2, 3, 4, 5]]]
    assert unserved_experts(replace(placement, slots=both), {("a", 1)}) == {3: [2, 3]}
