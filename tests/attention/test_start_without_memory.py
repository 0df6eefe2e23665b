"""KV or captured steps that a device has no memory for end the start with the flag to lower."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moesaic.cluster.rpc.server import ServiceStatus
from moesaic.dispatch.local import LocalDispatcher
from moesaic.engine.thread import engine_thread
from moesaic.errors import InUse
from moesaic.kernels.warm_up import WARMING
from moesaic.models.configuration.config import load_config
from moesaic.models.layers.decoder import Decoder
from moesaic.models.layers.kv_cache import KVCache
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.services.attention.engine import open_engine
from moesaic.services.attention.modes.contract import Mode
from moesaic.services.attention.settings import AttentionSettings
from tests.fake_device.cuda import fake_device

GPU, BF16 = torch.device("cuda", 0), torch.bfloat16
KV_BLOCK = 16 * 3 * 32 * 2  # tokens, layers, keys and values, bytes


async def opened(model: Any, kv_blocks: int, shortcut: Any = lambda cache: None) -> int:
    """Open an engine with so many blocks.

    Returns:
        The number that it has.
    """
    directory = str(model.directory)
    config, checkpoint = load_config(model.directory), Checkpoint(model.directory)
    settings = AttentionSettings(
        model=directory, device="cuda", dtype="bfloat16", kv_blocks=kv_blocks, sweep_bytes=0
    )
    status = ServiceStatus("attention", "a0", 1)
    dispatcher = LocalDispatcher(checkpoint, config, BF16, GPU)
    async with engine_thread(GPU) as thread:
        worker: Any = SimpleNamespace(
            settings=settings,
            config=config,
            decoder=Decoder.load(checkpoint, config, BF16, GPU),
            device=GPU,
            thread=thread,
            process=SimpleNamespace(status=status),
        )

        def told(cache: KVCache) -> Any:
            assert status.waiting_for == [WARMING]
            return shortcut(cache)

        mode = Mode(dispatcher, shortcut=told)
        running = await open_engine(worker, mode, lambda _: None, lambda *_: None)
        assert not status.waiting_for
        return running.engine.batcher.pool.num_blocks


async def test_blocks_that_do_not_fit_are_refused_with_their_bytes(tiny_model: Any) -> None:
    with fake_device(memory_bytes=1 << 20):
        assert await opened(tiny_model, 64) == 64
        with pytest.raises(InUse) as refused:
            await opened(tiny_model, 1 << 12)

    assert refused.value.field == "--kv-blocks"
    assert f"KV of 4096 blocks ({4096 * KV_BLOCK} bytes) does not fit the memory of cuda:0" in str(
        refused.value
    )


async def test_captured_steps_that_do_not_fit_name_their_own_flag(tiny_model: Any) -> None:
    def capture(cache: KVCache) -> None:
        torch.empty(1 << 20, device=GPU)

    with fake_device(memory_bytes=1 << 20), pytest.raises(InUse) as refused:
        await opened(tiny_model, 64, capture)

    assert refused.value.field == "--max-num-seqs"
    assert "captured steps of so many rows beside KV does not fit" in str(refused.value)
