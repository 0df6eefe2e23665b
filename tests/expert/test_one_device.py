"""Workers share one device, in whatever order they start."""

import gc
from typing import Any

import pytest
import torch

from benchmarks.common.placements import placed_worker, placement_of
from moesaic.errors import PlacementInfeasible
from moesaic.experts.host import ExpertHost
from moesaic.experts.loaded import layout_of
from moesaic.messages.placement import Placement
from moesaic.models.configuration.captured import captured_bytes
from moesaic.models.configuration.config import ModelConfig, load_config
from moesaic.models.configuration.sizes import (
    ON_GPU_BYTES,
    batch_bytes,
    least_attention_bytes,
    numbers_for,
)
from moesaic.models.layers.decoder import Decoder
from moesaic.models.layers.kv_cache import KVCache
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.services.attention.kv_room import kv_blocks_of
from moesaic.services.attention.settings import AttentionSettings
from moesaic.services.expert.room import SlotRoom, slot_room_of
from moesaic.services.expert.settings import ExpertSettings
from moesaic.transport.device_memory import memory_of
from tests.fake_device.cuda import fake_device

GPU, BF16 = torch.device("cuda", 0), torch.bfloat16
EXPERTS, LAYERS = 8, 3
SETTINGS: dict[str, Any] = {"model": "m", "device": "cuda", "dtype": "bfloat16"}


def context() -> torch.Tensor:
    """Take what CUDA takes for each process."""
    return torch.empty(ON_GPU_BYTES, dtype=torch.uint8, device=GPU)


def slot_bytes(config: ModelConfig) -> int:
    return layout_of(config, BF16, as_stored=True).nbytes * LAYERS


class ExpertWorker:
    """What ``main`` of an expert worker does with memory."""

    def __init__(self, model: Any, name: str = "e0") -> None:
        self.config, self.name, self.held = load_config(model.directory), name, context()
        settings, size = ExpertSettings(**SETTINGS), slot_bytes(self.config) // LAYERS
        self.room: SlotRoom = slot_room_of(settings, self.config, size, memory_of(GPU))
        self.host = ExpertHost(
            Checkpoint(model.directory),
            self.config,
            name,
            self.room.slots_per_layer,
            BF16,
            GPU,
            max_expert_bytes=self.room.max_expert_bytes,
        )

    def place(self, epoch: int = 1) -> None:
        """Load as many experts as there are slots."""
        slots = [list(range(self.host.slots_per_layer))]
        self.host.loader.prepare(self._placement(epoch, slots))
        self.host.epochs.commit(epoch)

    def _placement(self, epoch: int, slots: list[list[int]]) -> Placement:
        workers, digest = [placed_worker(self.name)], self.config.digest
        return placement_of(
            workers, slots, range(LAYERS), EXPERTS, epoch=epoch, model_digest=digest
        )


class AttentionWorker:
    """What ``main`` of an attention worker does with memory, up to the placement and after it."""

    def __init__(self, model: Any) -> None:
        self.config, self.held = load_config(model.directory), context()
        self.settings = AttentionSettings(**SETTINGS, kv_memory_fraction=0.5)
        self.decoder = Decoder.load(Checkpoint(model.directory), self.config, BF16, GPU)

    def take_kv(self) -> KVCache:
        """Take it as ``experts_placed`` lets it: once a placement is there."""
        return self.decoder.new_kv_cache(kv_blocks_of(self.settings, self.config))


def memory_for_both(config: ModelConfig, slots: int) -> int:
    """Bytes of a device that has room for so many slots beside an attention worker, and none for more."""
    numbers = numbers_for(ExpertSettings(**SETTINGS), config)
    others = (
        2 * ON_GPU_BYTES
        + batch_bytes(config, numbers)
        + least_attention_bytes(config, numbers)
        + captured_bytes(config, numbers, 64, config.max_positions)
    )
    return others + slots * slot_bytes(config)


@pytest.mark.parametrize("order", ["attention first", "experts first", "experts placed first"])
def test_both_find_their_memory_in_any_order(tiny_model: Any, order: str) -> None:
    config = load_config(tiny_model.directory)
    with fake_device(memory_bytes=memory_for_both(config, EXPERTS)):
        if order == "attention first":
            attention = AttentionWorker(tiny_model)
        experts = ExpertWorker(tiny_model)
        if order == "experts placed first":
            experts.place()
        if order != "attention first":
            attention = AttentionWorker(tiny_model)
        if order != "experts placed first":
            experts.place()
        cache = attention.take_kv()

        assert experts.room.slots_per_layer == EXPERTS
        assert cache.num_blocks * 16 >= 1024
        # And each may restart beside the other.
        again = cache.num_blocks
        del experts
        gc.collect()
        experts = ExpertWorker(tiny_model)
        experts.place()
        assert experts.room.slots_per_layer == EXPERTS
        del attention, cache
        gc.collect()
        assert AttentionWorker(tiny_model).take_kv().num_blocks == pytest.approx(again, rel=0.01)


def test_a_worker_that_finds_another_offers_fewer_slots(tiny_model: Any) -> None:
    config = load_config(tiny_model.directory)
    with fake_device(memory_bytes=memory_for_both(config, EXPERTS)):
        # Neither knows of the other when it decides.
        first, second = ExpertWorker(tiny_model, "e0"), ExpertWorker(tiny_model, "e1")
        assert first.room.slots_per_layer == second.room.slots_per_layer == EXPERTS
        free = memory_of(GPU).free - (EXPERTS + 4) * slot_bytes(config)
        taken = torch.empty(free, dtype=torch.uint8, device=GPU)

        first.place()
        with pytest.raises(PlacementInfeasible, match=r"cuda:0 had memory for [0-9]+ bytes"):
            second.place()
        gc.collect()
        assert second.host.epochs.resident_bytes == 0
        lowered = second.room.lowered(second.host.loader.fitted_bytes)
        second.host.loader.slots_per_layer = lowered.slots_per_layer
        second.host.loader.max_expert_bytes = lowered.max_expert_bytes
        second.place(2)

        assert lowered.slots_per_layer == 3  # and the fourth is for experts that move
        assert second.host.epochs.resident_bytes == 3 * slot_bytes(config)
        assert first.host.epochs.resident_bytes == EXPERTS * slot_bytes(config)
        del taken
