"""How a batch's experts are shared out among those that hold them, and that all workers agree."""

import asyncio
from typing import Any

import pytest
import torch

from moesaic.dispatch.routed.notes import DIVERGENCES
from moesaic.experts.answering import ACTIVATED, MOST_ACTIVATED
from moesaic.experts.basis import AssignmentBasis, all_schedulings
from moesaic.messages.scheduling import ExpertScheduling
from moesaic.transport.frame import Frame, FrameKind
from tests.dispatch.conftest import value_of

EVERYTHING = list(range(8))
NUM_EXPERTS, NUM_LAYERS = 8, 3
HALVES = [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("slots", [HALVES, [EVERYTHING, *HALVES]], ids=["alone", "replicas"])
async def test_workers_that_choose_other_experts_are_caught_and_overruled(
    cluster: Any, tiny_model: Any, slots: list[list[int]]
) -> None:
    async with cluster(tiny_model, len(slots), crooked=[len(slots) - 1]) as c:
        c.put_in_force(c.placement(1, *slots))
        await c.all_linked(1)
        before = value_of(DIVERGENCES)

        await c.check()

        assert value_of(DIVERGENCES) == before + 1


@pytest.mark.parametrize("scheduling", all_schedulings())
async def test_every_policy_gives_the_sums_of_local_experts(
    cluster: Any, tiny_model: Any, scheduling: ExpertScheduling
) -> None:
    async with cluster(tiny_model, 3, scheduling=scheduling) as c:
        c.put_in_force(c.placement(1, EVERYTHING, [0, 1, 2, 3], [7, 2, 5, 4, 6]))

        for rows in (1, 5, 40):
            await c.check(rows)


async def test_replicas_share_the_experts_of_a_row_evenly(cluster: Any, tiny_model: Any) -> None:
    async with cluster(tiny_model, 2) as c:
        c.put_in_force(c.placement(1, EVERYTHING, EVERYTHING))
        before = ACTIVATED.total, value_of(MOST_ACTIVATED)

        await c.check(1)

        top_k = c.config.moe.top_k
        assert top_k == 2
        assert ACTIVATED.total - before[0] == NUM_LAYERS * top_k
        # Each of the two workers has counted the larger half.
        assert value_of(MOST_ACTIVATED) - before[1] == NUM_LAYERS * 2 * (top_k // 2)


async def test_by_the_placement_alone_no_bit_of_a_row_depends_on_its_company(
    cluster: Any,
    tiny_model: Any,
) -> None:
    async with cluster(tiny_model, 3, scheduling="static") as c:
        c.put_in_force(c.placement(1, EVERYTHING, [0, 1, 2, 3], [7, 2, 5, 4, 6]))
        await c.routed.reachable()
        step = c.routed.begin_step()
        rows = torch.randn(24, 32)

        whole = await c.routed.dispatch(step, 1, rows)
        parts = await asyncio.gather(
            *(c.routed.dispatch(step, 1, part) for part in rows.split([1, 6, 17]))
        )

        assert torch.equal(torch.cat(parts), whole)
        c.routed.end_step(step)


async def test_a_worker_without_a_share_answers_without_rows(cluster: Any, tiny_model: Any) -> None:
    async with cluster(tiny_model, 2) as c:
        c.put_in_force(c.placement(1, EVERYTHING, EVERYTHING))
        routing = [torch.ones(3, 2), torch.full((3, 2), 5, dtype=torch.int32)]
        terms = AssignmentBasis("aebs", (0, 1), (0, 9)).encode()
        request = Frame(
            kind=FrameKind.REQUEST, epoch=1, tensors=[torch.randn(3, 32), terms, *routing]
        )

        one, other = [host.answers.answer(request) for host in c.hosts]

        assert one.digest == other.digest
        assert [list(t.shape) for t in one.tensors] == [[3, 32], [1, 2]]
        assert [list(t.shape) for t in other.tensors] == [[0, 32], [1, 2]]
        assert one.tensors[1].tolist() == other.tensors[1].tolist() == [[1, 9]]
