"""The number of a worker's KV blocks: as many as are asked for, or as fit into memory."""

import structlog

from moesaic.engine.sequences.blocks import blocks_for
from moesaic.models.configuration.captured import captured_bytes_of
from moesaic.models.configuration.config import ModelConfig
from moesaic.models.configuration.sizes import (
    LEAST_KV_TOKENS,
    kv_bytes,
    numbers_for,
    step_bytes,
    usual_kv_tokens,
)
from moesaic.prefix.blocks import BLOCK_SIZE
from moesaic.services.attention.settings import AttentionSettings
from moesaic.transport.device_memory import device_named, memory_of

log = structlog.get_logger()

LEAST_BLOCKS = LEAST_KV_TOKENS // BLOCK_SIZE
USUAL_BLOCKS = usual_kv_tokens(0) // BLOCK_SIZE  # of a model of short contexts


def kv_blocks_of(settings: AttentionSettings, config: ModelConfig) -> int:
    """Count the KV blocks to make, once the weights are loaded.

    ``config`` describes the part of this rank; of several on a CPU, each takes as much memory.
    Free memory is not all ours then: other processes grow too, and activations take some.
    """
    numbers = numbers_for(settings, config)
    block_bytes = BLOCK_SIZE * kv_bytes(config, numbers)
    rows = settings.max_num_batched_tokens
    step = step_bytes(config, numbers, rows, min(rows, settings.max_num_seqs))
    step += captured_bytes_of(settings, config, numbers)
    left = max(0, memory_of(device_named(settings.device)).free - step)
    memory_bytes = int(settings.kv_memory_fraction * left)
    if settings.device == "cpu":
        memory_bytes //= settings.tensor_parallel
    num_blocks = settings.kv_blocks or blocks_within(
        memory_bytes, block_bytes, config.max_positions
    )
    max_tokens = min(num_blocks * BLOCK_SIZE, config.max_positions)
    log.info("kv.sized", blocks=num_blocks, bytes=num_blocks * block_bytes, max_tokens=max_tokens)
    if max_tokens < config.max_positions:
        log.warning("kv.short", max_tokens=max_tokens, model_tokens=config.max_positions)
    return num_blocks


def blocks_within(memory_bytes: int, block_bytes: int, max_positions: int) -> int:
    """Count the KV blocks for a model of ``max_positions`` in so much memory.

    Returns:
        No fewer than work at all, no more than are likely to be used.
    """
    most = blocks_for(usual_kv_tokens(max_positions))
    return min(max(memory_bytes // block_bytes, LEAST_BLOCKS), most)
