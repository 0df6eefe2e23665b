"""Slots fit the memory of a device: beside an attention worker, and again after a restart."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.errors import InUse
from moesaic.models.configuration.captured import captured_bytes
from moesaic.models.configuration.config import ModelConfig, load_config
from moesaic.models.configuration.sizes import (
    MOVING,
    ON_GPU_BYTES,
    least_attention_bytes,
    numbers_for,
    weight_bytes,
)
from moesaic.services.expert.room import SlotRoom, slot_room_of
from moesaic.services.expert.settings import ExpertSettings
from moesaic.transport.device_memory import MemoryOf

GIB = 1 << 30


def settings_of(device: str = "cuda", **more: Any) -> ExpertSettings:
    return ExpertSettings(model="m", device=device, dtype="bfloat16", **more)


@pytest.fixture(scope="module")
def config(request: pytest.FixtureRequest) -> ModelConfig:
    """A model of the size of Qwen3-30B-A3B: 54 GiB of experts in bfloat16, and 3 GiB beside them."""
    small = load_config(request.getfixturevalue("tiny_model").directory)
    moe = replace(small.moe, num_experts=128, top_k=8, expert_size=768, shared_expert_size=0)
    attention: Any = replace(small.attention, num_heads=32, num_kv_heads=4, head_dim=128)
    return replace(
        small,
        hidden_size=2048,
        num_layers=48,
        moe_layers=tuple(range(48)),
        vocab_size=151_936,
        max_positions=40_960,
        moe=moe,
        attention=attention,
    )


def bytes_of(config: ModelConfig, settings: ExpertSettings) -> tuple[int, int, int]:
    """Bytes of an expert, of a slot in all layers, and of the least attention worker."""
    numbers = numbers_for(settings, config)
    expert = weight_bytes(config, numbers).expert
    attention = least_attention_bytes(config, numbers) + ON_GPU_BYTES
    attention += captured_bytes(config, numbers, 64, config.max_positions)
    return expert, 48 * expert, attention


def room(config: ModelConfig, settings: ExpertSettings, free: int, total: int = 0) -> SlotRoom:
    expert, *_ = bytes_of(config, settings)
    return slot_room_of(settings, config, expert, MemoryOf(free, total or free))


def test_all_experts_of_a_model_that_fits_have_a_slot(config: ModelConfig) -> None:
    found = room(config, settings_of(), 80 * GIB)

    assert found.slots_per_layer == 128
    assert 128 * found.layer_bytes < found.max_expert_bytes < 73 * GIB


def test_others_have_their_part_of_a_gpu_that_is_too_small_for_all(config: ModelConfig) -> None:
    for gib in (16, 24, 40, 48):
        found = room(config, settings_of(), gib * GIB)
        _, slot, attention = bytes_of(config, settings_of())

        assert 0 < found.slots_per_layer < 128
        held = found.slots_per_layer * slot
        assert held + held // MOVING + attention <= gib * GIB
        # And one slot more would not.
        assert (held + slot) * (MOVING + 1) // MOVING > found.max_expert_bytes


def test_a_worker_that_restarts_beside_an_attention_worker_gets_its_slots_again(
    config: ModelConfig,
) -> None:
    _, slot, attention = bytes_of(config, settings_of())
    least = next(
        gib
        for gib in range(50, 80)
        if room(config, settings_of(), gib * GIB).slots_per_layer == 128
    )
    total = least * GIB

    beside = total - attention - (total - 128 * slot - attention) // 2  # KV took half of the rest
    assert room(config, settings_of(), beside, total).slots_per_layer == 128


def test_a_worker_with_a_part_of_the_experts_gets_its_slots_again_too(config: ModelConfig) -> None:
    """KV has taken half of what was left, and so a part of the memory for experts that move."""
    _, slot, attention = bytes_of(config, settings_of())
    for gib in range(16, 61):
        total = gib * GIB
        slots = room(config, settings_of(), total).slots_per_layer
        assert 0 < slots < 128
        left = total - attention - ON_GPU_BYTES - slots * slot

        again = room(config, settings_of(), total - attention - ON_GPU_BYTES - left // 2, total)

        assert again.slots_per_layer == slots


@given(st.integers(1, 200 * GIB), st.integers(0, 200 * GIB), st.integers(0, 100 * GIB))
def test_slots_never_take_more_than_there_is(
    config: ModelConfig, free: int, used: int, limit: int
) -> None:
    try:
        found = room(config, settings_of(max_expert_bytes=limit), free, free + used)
    except InUse:
        return
    assert 1 <= found.slots_per_layer <= 128
    assert found.slots_per_layer * found.layer_bytes <= found.max_expert_bytes <= free
    assert not limit or found.max_expert_bytes <= limit


def test_a_number_that_was_asked_for_stands(config: ModelConfig) -> None:
    found = room(config, settings_of(slots_per_layer=99), GIB)

    assert (found.slots_per_layer, found.max_expert_bytes) == (99, 0)
    assert found.lowered(GIB) == found


def test_memory_that_nobody_knows_bounds_nothing(config: ModelConfig) -> None:
    found = room(config, settings_of("cpu"), 0)

    assert (found.slots_per_layer, found.max_expert_bytes) == (128, 0)


def test_a_device_without_memory_for_one_slot_is_refused(config: ModelConfig) -> None:
    with pytest.raises(
        InUse, match=r"--slots-per-layer: one slot of every layer takes [0-9]+ bytes"
    ):
        room(config, settings_of(), 3 * GIB)


@given(st.integers(1, 127))
def test_a_worker_that_found_less_memory_offers_what_fitted(
    config: ModelConfig, fitted: int
) -> None:
    before = room(config, settings_of(), 80 * GIB)
    after = before.lowered(fitted * before.layer_bytes)

    assert after.slots_per_layer < before.slots_per_layer
    assert after.slots_per_layer <= fitted
    assert after.max_expert_bytes == fitted * before.layer_bytes
    assert after.lowered(after.max_expert_bytes) == after
