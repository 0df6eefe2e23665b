from moesaic.messages.placement import PlacedWorker, Placement
from moesaic.placement.decide.coverage import missing_experts


def placed(slots: list[list[list[int]]]) -> Placement:
    return Placement(
        epoch=1,
        model_digest="d",
        num_experts=4,
        workers=[
            PlacedWorker(worker_id=name, generation=1, admin_address="", data_address="")
            for name in ("a", "b")
        ],
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
