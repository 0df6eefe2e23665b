"""On a GPU, an attention worker warms its kernels, and says so; those of degraded steps when a policy comes."""

import asyncio
from collections.abc import Awaitable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from moesaic.brownout.split import Level
from moesaic.cluster.rpc.admin import ServiceStatus
from moesaic.dispatch.local import LocalDispatcher
from moesaic.engine.thread import EngineThread
from moesaic.kernels.promised import PromisedRows
from moesaic.messages.brownout import BrownoutPolicy
from moesaic.models.configuration.config import load_config
from moesaic.models.layers.decoder import Decoder
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.services.attention.engine import warm_up, warm_up_degraded
from moesaic.services.attention.modes.contract import Mode
from moesaic.services.attention.settings import AttentionSettings
from moesaic.services.attention.substitution import SubstitutionFollower
from tests.kernels.conftest import launches

__all__ = ["launches"]


class Thread:
    async def run(self, work: Awaitable[None]) -> None:
        await work


@pytest.mark.parametrize("device", ["cuda", "cpu"])
async def test_people_are_told_of_the_warm_up(tiny_model: Any, device: str) -> None:
    status = ServiceStatus("attention", "a0", 1)
    seen: list[tuple[list[str], int]] = []

    async def experts(layer: int, hidden_states: torch.Tensor) -> torch.Tensor:
        seen.append((list(status.waiting_for), len(hidden_states)))
        return torch.zeros_like(hidden_states)

    directory, cpu = tiny_model.directory, torch.device("cpu")
    config = load_config(directory)
    worker: Any = SimpleNamespace(
        settings=AttentionSettings(
            model=str(directory), device=device, max_num_batched_tokens=24, max_num_seqs=3
        ),
        process=SimpleNamespace(status=status),
        decoder=Decoder.load(Checkpoint(directory), config, torch.float32, cpu),
        thread=Thread(),
    )
    nobody: Any = None

    await warm_up(worker, Mode(nobody, experts=experts))

    assert status.waiting_for == []
    assert all(waits == ["warming kernels"] for waits, _ in seen)
    assert max((rows for _, rows in seen), default=0) == (24 if device == "cuda" else 0)


CPU = torch.device("cpu")


def degraded_worker(model: Any, device: str) -> Any:
    return SimpleNamespace(
        settings=AttentionSettings(
            model=str(model.directory), device=device, max_num_batched_tokens=16
        ),
        decoder=SimpleNamespace(config=load_config(model.directory), dtype=torch.float32),
        device=CPU,
    )


@pytest.mark.parametrize("way", [0, 2])
async def test_a_policy_meets_its_kernels_before_it_degrades(
    tiny_model: Any, launches: set[str], way: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moesaic.kernels.triton.grouped_experts.FEW", 4)  # choices: more are sorted
    config = load_config(tiny_model.directory)
    local = LocalDispatcher(Checkpoint(tiny_model.directory), config, torch.float32, CPU)
    warming = partial(warm_up_degraded, degraded_worker(tiny_model, "cuda"))
    thread = EngineThread(asyncio.get_running_loop())
    following = SubstitutionFollower(local, thread, warming)

    await following.follow(BrownoutPolicy())
    assert not launches
    await following.follow(BrownoutPolicy(mode="auto", way=way))
    await asyncio.sleep(0)  # it is adopted
    warmed = set(launches)
    for rows in (2, 3):
        promised = PromisedRows([Level(0.6), Level(0.3, 1)], [row % 2 for row in range(rows)])
        hidden = torch.randn(rows, config.hidden_size)
        await local.dispatch(local.begin_step(), 1, hidden, promised)

    names = {key.partition(" ")[0] for key in warmed}
    assert {"_count_rows_kernel", "_decide_kernel", "_rewrite_kernel", "_place_kernel"} <= names
    assert launches == warmed


@pytest.mark.parametrize(("device", "warnings"), [("cuda", ["kernels.cold"]), ("cpu", [])])
def test_a_policy_is_followed_even_if_degraded_steps_lack_memory(
    tiny_model: Any, device: str, warnings: list[str]
) -> None:
    class Full:
        def degraded(self, *_: Any) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

    full: Any = Full()
    with capture_logs() as logs:
        warm_up_degraded(degraded_worker(tiny_model, device), full, full)

    assert [log["event"] for log in logs] == warnings
