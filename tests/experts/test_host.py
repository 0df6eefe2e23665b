"""What an expert worker answers, refuses, and keeps in its slots."""

from typing import Any

import pytest
import torch

from moesaic.errors import ExpertUnavailable, InvalidInput, NotReady, StaleEpoch
from moesaic.experts.basis import AssignmentBasis
from moesaic.transport.frame import Frame, FrameKind

CPU, FP32 = torch.device("cpu"), torch.float32
EVERYTHING = list(range(8))
NUM_EXPERTS, NUM_LAYERS = 8, 3
HALVES = [[0, 1, 2, 3], [4, 5, 6, 7]]


ROUTING = [torch.ones(3, 2), torch.zeros(3, 2, dtype=torch.int32)]


@pytest.mark.parametrize(
    ("field", "tensors"),
    [
        ("tensors[1]", [torch.tensor([[0, 0, 7]])]),
        ("tensors[1]", [torch.tensor([[0, 0, 1], [0, -3, 0]])]),
        ("tensors[1]", [torch.tensor([[0, 1]], dtype=torch.int32)]),
        ("tensors[2]", [AssignmentBasis("aebs", (0,)).encode(), ROUTING[0][:2], ROUTING[1]]),
        ("tensors[2]", [AssignmentBasis("aebs", (0,)).encode(), ROUTING[0].double(), ROUTING[1]]),
        ("tensors[3]", [AssignmentBasis("aebs", (0,)).encode(), ROUTING[0], ROUTING[1][:, :1]]),
        ("tensors[3]", [AssignmentBasis("aebs", (0,)).encode(), ROUTING[0], ROUTING[1].long()]),
        ("tensors[3]", [AssignmentBasis("aebs", (0,)).encode(), ROUTING[0], ROUTING[1] + 8]),
        ("tensors[3]", [AssignmentBasis("aebs", (0,)).encode(), ROUTING[0], ROUTING[1] - 3]),
        ("layer", [AssignmentBasis("aebs", (0,)).encode(), ROUTING[0]]),
    ],
)
async def test_a_request_that_is_none_is_refused_by_field(
    cluster: Any, tiny_model: Any, field: str, tensors: list[torch.Tensor]
) -> None:
    async with cluster(tiny_model, 2) as c:
        c.put_in_force(c.placement(1, EVERYTHING, EVERYTHING))
        request = Frame(kind=FrameKind.REQUEST, epoch=1, tensors=[torch.randn(3, 32), *tensors])

        with pytest.raises(InvalidInput) as refused:
            c.hosts[0].answers.answer(request)

    assert refused.value.field == f"frame.{field}"


def test_preparing_again_loads_nothing_and_a_move_loads_only_what_is_missing(
    unlinked_cluster: Any,
    tiny_model: Any,
) -> None:
    c = unlinked_cluster(tiny_model, 1, slots=4)
    c.addresses = ["nowhere", "nowhere"]
    host = c.hosts[0]

    first = host.loader.prepare(c.placement(1, [0, 1, 2, 3], [4, 5, 6, 7]))
    again = host.loader.prepare(c.placement(1, [0, 1, 2, 3], [4, 5, 6, 7]))
    host.epochs.commit(1)
    moved = host.loader.prepare(c.placement(2, [0, 1, 2, 7], [4, 5, 6, 3]))

    assert (first.loaded, first.kept) == (4 * NUM_LAYERS, 0)
    assert (again.loaded, again.kept) == (0, 4 * NUM_LAYERS)
    assert (moved.loaded, moved.kept) == (NUM_LAYERS, 3 * NUM_LAYERS)
    assert host.epochs.in_force == 1
    host.epochs.abort(2)
    with pytest.raises(NotReady):
        host.epochs.commit(2)


def test_a_placement_that_does_not_fit_is_refused_by_field(
    unlinked_cluster: Any, tiny_model: Any
) -> None:
    c = unlinked_cluster(tiny_model, 1, slots=4)
    c.addresses = ["nowhere", "nowhere"]
    host = c.hosts[0]

    with pytest.raises(InvalidInput, match=r"slots: .* 8 slots"):
        host.loader.prepare(c.placement(1, list(range(8))))
    host.loader.prepare(c.placement(3, *HALVES))
    host.epochs.commit(3)
    with pytest.raises(StaleEpoch):
        host.loader.prepare(c.placement(2, *HALVES))
    with pytest.raises(StaleEpoch):
        host.epochs.commit(2)


async def test_an_epoch_in_force_cannot_become_another_placement(
    cluster: Any, tiny_model: Any
) -> None:
    async with cluster(tiny_model, 2) as c:
        c.put_in_force(c.placement(1, *HALVES))

        c.hosts[0].loader.prepare(c.placement(1, *HALVES))
        with pytest.raises(StaleEpoch):
            c.hosts[0].loader.prepare(c.placement(1, *reversed(HALVES)))
        assert await c.check() == 1


async def test_workers_with_different_placements_of_one_epoch_are_not_added_up(
    cluster: Any,
    tiny_model: Any,
) -> None:
    async with cluster(tiny_model, 2) as c:
        c.hosts[0].loader.prepare(c.placement(1, *HALVES))
        c.hosts[1].loader.prepare(c.placement(1, *reversed(HALVES)))
        c.routed.set_placement(c.placement(1, *HALVES))

        with pytest.raises(ExpertUnavailable, match="different placements"):
            await c.check()
