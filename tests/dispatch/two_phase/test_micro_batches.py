"""Several batches of one step are under way at once, also in two phases: each meets its like of the
neighbours, none waits for another, and all are right."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from moesaic.dispatch.two_phase import metrics
from moesaic.dispatch.two_phase.way import MANY_ROWS
from tests.dispatch.conftest import value_of

MESSAGES = {"reduce": 4 + 2, "relay": 2 + 2}  # of a round: there, and back from each node


async def check(lab: Any, parts: Sequence[Sequence[int]], seed: int = 0) -> None:
    """All workers step at the same time, each in so many parts; every layer is right, to the bit."""
    found = await asyncio.gather(
        *(lab.parts(worker, rows, seed) for worker, rows in enumerate(parts))
    )
    for worker, rows in enumerate(parts):
        for number, count in enumerate(rows):
            at = seed + 100 * number
            expected = await lab.expected(worker, count, at)
            directly = await lab.direct(worker, count, at)
            for got, close, equal in zip(found[worker][number], expected, directly, strict=True):
                torch.testing.assert_close(got, close, rtol=1e-5, atol=1e-5)
                assert torch.equal(got, equal)


@pytest.mark.parametrize("mode", ["reduce", "relay", "direct"])
@pytest.mark.parametrize(
    "parts", [[[3, 5], [4, 2]], [[3, 5, 1], [4], [2, 2]], [[6], [4, 4]], [[2, 0], [0, 3]]]
)
async def test_any_number_of_batches_gives_the_sums_of_local_experts(
    open_lab: Any, parts: list[list[int]], mode: str
) -> None:
    async with open_lab("inprocess", ["a"] * len(parts), ["x", "x", "y"], mode) as lab:
        await check(lab, parts)
        await check(lab, parts, seed=50)


async def test_a_batch_of_few_rows_does_not_part_others_of_its_step(
    open_lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = MANY_ROWS - 1
    monkeypatch.setattr("moesaic.dispatch.two_phase.dispatcher._FEW_S", 0.0)
    monkeypatch.setattr("moesaic.dispatch.two_phase.steps._LATELY_S", 3600.0)
    async with open_lab("inprocess", ["a", "a"], ["x", "x"], "auto") as lab:
        await lab.parts(1, [few])
        monkeypatch.setattr("moesaic.dispatch.two_phase.dispatcher._FEW_S", 3600.0)
        await lab.parts(0, [few, few])  # the second batch has nobody to go with
        before = value_of(metrics.ROUNDS, "relay")

        await lab.parts(0, [few, few])

        assert value_of(metrics.ROUNDS, "relay") == before + len(lab.config.moe_layers)


@pytest.mark.parametrize("mode", ["reduce", "relay"])
@pytest.mark.parametrize("kind", ["shm", "tcp"])
async def test_real_links_carry_several_batches_at_once(
    open_lab: Any, kind: str, mode: str
) -> None:
    async with open_lab(kind, ["a", "a", "b"], ["x", "x", "y", "y"], mode) as lab:
        await check(lab, [[64, 20], [17, 17], [5, 8]])
        await check(lab, [[64, 20], [17, 17], [5, 8]], seed=9)


@pytest.mark.parametrize("mode", ["reduce", "relay"])
async def test_batches_of_two_workers_meet_one_by_one(
    open_lab: Any, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """The second batch of a worker whose rows another brings together went directly."""
    monkeypatch.setattr("moesaic.dispatch.two_phase.dispatcher._ALONE_S", 0.0)
    async with open_lab("inprocess", ["a", "a"], ["x", "x", "y", "y"], mode) as lab:
        waits = lab.attention[0].two_phase.waits
        both = {"attention-0", "attention-1"}
        for _ in range(50):
            await check(lab, [[4, 4], [4, 4]])
            if all(waits.regulars(lane) == both for lane in (0, 1)):
                break
        assert all(waits.regulars(lane) == both for lane in (0, 1))
        monkeypatch.setattr("moesaic.dispatch.two_phase.waiting._PATIENCE_S", (60.0, 60.0))
        before = value_of(metrics.MESSAGES, "inter")

        await asyncio.gather(lab.parts(0, [4, 4]), lab.parts(1, [4, 4]))

        per_layer = (value_of(metrics.MESSAGES, "inter") - before) / len(lab.config.moe_layers)
        assert per_layer == 2 * MESSAGES[mode]


async def test_a_batch_that_fails_takes_no_other_with_it(open_lab: Any) -> None:
    async with open_lab("inprocess", ["a", "a"], ["x", "x"], "relay") as lab:
        await check(lab, [[3, 3], [3, 3]])
        expert, failed = lab.experts[0], []
        compute = expert.compute

        def fails_once(request: Any) -> Any:
            if not failed:
                failed.append(request)
                raise RuntimeError("of any kind")
            return compute(request)

        expert.compute = fails_once
        await check(lab, [[3, 3], [3, 3]])

        assert failed
