"""Experts that come to the rows give the same bits as experts that were there, whatever happens to their sources."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import REGISTRY

from benchmarks.parity_cases import CASES, build_reference

BASES = [case for case in CASES if case.name == "base"]


def fetched_from(source: str) -> float:
    return REGISTRY.get_sample_value("moesaic_gather_fetched_bytes_total", {"source": source}) or 0


@pytest.mark.parametrize("window", [1, 2, 7])
@pytest.mark.parametrize(("count", "offload"), [(1, True), (2, False), (3, False), (3, True)])
async def test_any_window_and_any_sources_give_the_bits_of_local_experts(
    tiny_model: Any, start: Any, count: int, offload: bool, window: int
) -> None:
    async with start(tiny_model.directory, count, offload=offload, window=window) as workers:
        for worker in range(count):
            for rows in (1, 9, 130):
                await workers.step(worker, rows)


@pytest.mark.parametrize("case", BASES, ids=str)
async def test_every_family_gives_the_bits_of_local_experts(
    case: Any, tmp_path: Path, start: Any
) -> None:
    build_reference(case, tmp_path)

    async with start(tmp_path, 2, offload=True) as workers:
        for _ in range(3):
            await workers.step(1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
async def test_other_forms_of_weights_stream_as_well(
    tiny_model: Any, start: Any, dtype: torch.dtype
) -> None:
    form = {"dtype": dtype} if dtype == torch.bfloat16 else {"quantization": "int8"}
    async with start(tiny_model.directory, 2, **form) as workers:
        for layer in workers.layers:
            hidden = torch.randn(5, workers.hidden_size).to(dtype)
            dispatcher, local = workers.workers[0].dispatcher, workers.local
            got = await dispatcher.dispatch(dispatcher.begin_step(), layer, hidden)
            assert torch.equal(got, await local.dispatch(local.begin_step(), layer, hidden))


async def test_a_step_that_ended_early_is_run_again_from_the_first_layer(
    tiny_model: Any, start: Any
) -> None:
    async with start(tiny_model.directory, 2) as workers:
        for upto in (1, 2, None, 2, None):
            await workers.step(upto=upto)


async def test_a_lost_holder_costs_no_step(tiny_model: Any, start: Any) -> None:
    async with start(tiny_model.directory, 3) as workers:
        await workers.step()
        before = fetched_from("checkpoint")

        await workers.networks[1].close()

        for _ in range(3):
            await workers.step()
        assert fetched_from("checkpoint") > before
        assert workers.workers[0].mover.missing == [workers.workers[1].plan.share]


async def test_without_peers_the_checkpoint_has_everything(tiny_model: Any, start: Any) -> None:
    async with start(tiny_model.directory, 2, linked=False) as workers:
        await workers.step()
        await workers.step()


