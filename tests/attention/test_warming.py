"""An attention worker says what it waits for while it warms its kernels, on a GPU alone."""

from collections.abc import Awaitable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moesaic.cluster.rpc.admin import ServiceStatus
from moesaic.models.configuration.config import load_config
from moesaic.models.layers.decoder import Decoder
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.services.attention.engine import warm_up
from moesaic.services.attention.modes.contract import Mode
from moesaic.services.attention.settings import AttentionSettings


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
