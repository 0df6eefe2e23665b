"""Every way to the experts with all tensors on a device: nothing is left on the host by mistake.

Kernels are interpreted, so batches are small and few layers are asked for.
"""

import asyncio
from typing import Any

import pytest
import torch
from torch import Tensor

from moesaic.brownout.split import Level
from moesaic.dispatch.contract import Dispatcher
from moesaic.kernels.promised import PromisedRows
from moesaic.messages.substitution import Substitution
from tests.dispatch.conftest import open_cluster

pytestmark = [pytest.mark.usefixtures("gpu"), pytest.mark.suite]

GPU = torch.device("cuda", 0)
HALVES = [[0, 1, 2, 3], [4, 5, 6, 7]]
THIRDS = [[0, 3, 6], [1, 4, 7, 0], [2, 5]]
EVERYTHING = list(range(8))


async def sums(
    dispatcher: Dispatcher, rows: Tensor, promised: PromisedRows | None = None
) -> Tensor:
    """The sums of one layer, for its rows on the device."""
    await dispatcher.reachable()
    step = dispatcher.begin_step()
    try:
        with torch.inference_mode():
            found = await dispatcher.dispatch(step, 1, rows, promised)
    finally:
        dispatcher.end_step(step)
    assert found.device == rows.device
    assert found.dtype == rows.dtype
    return found.cpu()


async def check(dispatcher: Dispatcher, local: Dispatcher, dtype: Any = torch.float32) -> None:
    """Compare with experts in this process, on the same device."""
    rows = torch.randn(5, 32, device=GPU, dtype=dtype)
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    found, expected = await sums(dispatcher, rows), await sums(local, rows)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("slots", "options"),
    [
        (HALVES, {}),
        (THIRDS, {"scheduling": "random"}),
        ([EVERYTHING, EVERYTHING], {"scheduling": "aebs-memory-bound"}),
        (THIRDS, {"deterministic": True}),
        (HALVES, {"dtype": torch.bfloat16}),
        (HALVES, {"crooked": [1]}),
    ],
    ids=["halves", "random", "replicas", "deterministic", "bfloat16", "diverged"],
)
async def test_routed(tiny_model: Any, slots: list[list[int]], options: dict[str, Any]) -> None:
    async with open_cluster(tiny_model, len(slots), where=GPU, **options) as c:
        c.put_in_force(c.placement(1, *slots))
        await c.all_linked(1)
        await check(c.routed, c.local, options.get("dtype", torch.float32))


async def test_int8_rows_stay_close(tiny_model: Any) -> None:
    async with open_cluster(tiny_model, 2, where=GPU, wire="int8") as c:
        c.put_in_force(c.placement(1, *HALVES))
        await c.all_linked(1)
        rows = torch.randn(5, 32, device=GPU)

        found, expected = await sums(c.routed, rows), await sums(c.local, rows)

    assert torch.cosine_similarity(found, expected, dim=-1).min() > 0.99


@pytest.mark.parametrize("deterministic", [False, True])
async def test_routed_rows_with_promises(
    tiny_model: Any, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moesaic.experts.warm_up.MOST_ROWS", 2)
    degrading = Substitution(instead="fewer")
    async with open_cluster(
        tiny_model, 2, where=GPU, substitution=degrading, deterministic=deterministic
    ) as c:
        c.put_in_force(c.placement(1, *HALVES))
        await c.all_linked(1)
        rows = torch.randn(5, 32, device=GPU)
        given = [PromisedRows([Level(0.0), Level(0.5)], [0, 1, 0, 1, 1], GPU) for _ in range(2)]

        found = await sums(c.routed, rows, given[0])
        expected = await sums(c.local, rows, given[1])

    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert given[0].degraded.cpu().sum() == given[1].degraded.cpu().sum() > 0


@pytest.mark.parametrize("mode", ["relay", "reduce"])
async def test_two_phases(open_lab: Any, mode: Any) -> None:
    async with open_lab("inprocess", ["a", "a"], ["b", "b"], mode, where=GPU) as lab:
        rows = torch.randn(17, 32, device=GPU), torch.randn(2, 32, device=GPU)

        found = await asyncio.gather(
            *(sums(each.dispatcher, part) for each, part in zip(lab.attention, rows, strict=True))
        )

        for got, part in zip(found, rows, strict=True):
            expected = await sums(lab.local, part)
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("held", [HALVES, [[0, 1, 2], [3]]], ids=["peers", "files"])
async def test_edge_sites(
    sites: Any, tiny_model: Any, held: list[list[int]], deterministic: bool
) -> None:
    options = {"files": held is not HALVES, "deterministic": deterministic}
    async with sites(tiny_model, 2, where=GPU, **options) as s:
        s.put_in_force(s.placement(1, *held))
        await s.linked()
        for site in s.sites:
            await check(site.dispatcher, s.local)


async def test_an_edge_site_without_a_placement_serves_from_files(
    sites: Any, tiny_model: Any
) -> None:
    async with sites(tiny_model, 1, files=True, where=GPU) as s:
        await check(s.sites[0].dispatcher, s.local)
