"""Packed rows in two phases: packed between nodes, float32 sums inside them."""

from typing import Any

import pytest
import torch

from moesaic.dispatch.sum_order import add_up
from moesaic.experts.frames import FLOAT32_SUMS
from moesaic.experts.wire_rows import from_wire, pack_rows, to_wire
from moesaic.transport.frame import Frame, FrameKind

LAYER, ROWS = 1, 9


@pytest.mark.parametrize("mode", ["reduce", "relay"])
async def test_a_node_rounds_its_sum_once(open_lab: Any, mode: str) -> None:
    async with open_lab("inprocess", ["a"], ["x", "x", "y"], mode, wire="int8") as lab:
        hidden, reach = lab.rows(ROWS, 0, LAYER), lab.attention[0].dispatcher.route_of(1)
        seen = [from_wire(pack_rows(hidden)), reach.basis_of(LAYER)]
        request = Frame(kind=FrameKind.REQUEST, epoch=1, layer=LAYER, tensors=seen)
        parts = [expert.host.answers.answer(request).tensors[0] for expert in lab.experts]
        asked: dict[int, Frame] = {}
        for idx, expert in enumerate(lab.experts):
            _note(expert, asked, idx)

        found = await lab.step(0, ROWS)

        nodes = [from_wire(pack_rows(add_up(node, ROWS))) for node in (parts[:2], parts[2:])]
        assert torch.equal(found[LAYER], add_up(nodes, ROWS))
        assert {each.tensors[0].dtype for each in asked.values()} == {torch.int8}
        assert [asked[idx].flags for idx in range(3)] == [FLOAT32_SUMS, FLOAT32_SUMS, 0]


@pytest.mark.parametrize("flags", [0, FLOAT32_SUMS])
async def test_only_those_who_add_up_get_float32(open_lab: Any, flags: int) -> None:
    async with open_lab("inprocess", ["a"], ["x"], "direct", wire="int8") as lab:
        basis = lab.attention[0].dispatcher.route_of(1).basis_of(LAYER)
        tensors = [to_wire(lab.rows(ROWS, 0, LAYER), "int8"), basis]
        request = Frame(kind=FrameKind.REQUEST, epoch=1, layer=LAYER, flags=flags, tensors=tensors)

        [sums] = lab.experts[0].host.answers.answer(request).tensors

        assert sums.dtype == (torch.float32 if flags else torch.int8)


def _note(expert: Any, asked: dict[int, Frame], idx: int) -> None:
    """Keep what a worker is asked to compute in the one layer."""
    compute = expert.compute

    def noting(request: Frame) -> Any:
        if request.layer == LAYER:
            asked[idx] = request
        return compute(request)

    expert.compute = noting
