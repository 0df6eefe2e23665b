"""What an attention worker's engine is made of."""

from collections.abc import Callable
from functools import partial

import structlog
import torch

from moesaic.classification.forms import MAX_LABELS
from moesaic.dispatch.contract import Dispatcher
from moesaic.dispatch.local import LocalDispatcher
from moesaic.dispatch.routed import RoutedDispatcher
from moesaic.engine.blocks import BLOCK_SIZE, blocks_for
from moesaic.engine.engine import Engine, Shortcut, TellBlocks
from moesaic.engine.limits import Limits
from moesaic.engine.requests import Event
from moesaic.engine.sweeps import MOST_SWEEPS
from moesaic.models.config import ModelConfig
from moesaic.models.decode_graphs import DecodeGraphs
from moesaic.models.decoder import Decoder
from moesaic.models.kv_cache import KVCache
from moesaic.models.sweep_area import SweepArea
from moesaic.prefix.block_hashes import BlockHasher
from services.attention.kv_room import kv_blocks_of
from services.attention.settings import AttentionSettings

log = structlog.get_logger()


async def open_engine(
    settings: AttentionSettings,
    config: ModelConfig,
    decoder: Decoder,
    dispatcher: Dispatcher,
    emit: Callable[[list[Event]], None],
    hasher: BlockHasher | None,
    tell_blocks: TellBlocks,
) -> Engine:
    """The engine of an attention worker; call it on the engine's thread."""
    limits = Limits(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_queued_reqs=settings.max_num_queued_reqs,
        max_num_queued_tokens=settings.max_num_queued_tokens,
        max_model_len=config.max_positions,
        sweep_blocks=_sweep_blocks(settings, config),
        store_scoring_kv=settings.store_scoring_kv,
    )
    return Engine(
        decoder,
        dispatcher,
        limits,
        kv_blocks_of(settings, config),
        emit,
        settings.recovery_s,
        hasher,
        tell_blocks,
        # Others have one batch of a step at a time, or would gain nothing.
        settings.micro_batches if isinstance(dispatcher, RoutedDispatcher) else 1,
        partial(_shortcut, settings, decoder, dispatcher),
        settings.step_target_s,
    )


def _shortcut(
    settings: AttentionSettings, decoder: Decoder, dispatcher: Dispatcher, cache: KVCache
) -> Shortcut | None:
    """What computes steps whose experts are all here."""
    if not isinstance(dispatcher, LocalDispatcher):
        return None
    if settings.device == "cpu":
        return decoder.whole_steps(dispatcher.kernels, cache)
    if not settings.decode_graph_tokens:
        return None
    moe = partial(dispatcher.dispatch, dispatcher.begin_step())
    max_length = min(settings.decode_graph_tokens, decoder.config.max_positions)
    return DecodeGraphs(decoder, cache, moe, settings.max_num_seqs, max_length)


def _sweep_blocks(settings: AttentionSettings, config: ModelConfig) -> int:
    dtype: torch.dtype = getattr(torch, settings.dtype)
    block_bytes = SweepArea.block_bytes(config, dtype, BLOCK_SIZE)
    # More than so many prompts of any length, with as many labels as there may be, find no use for it.
    lanes = MAX_LABELS * blocks_for(2 * BLOCK_SIZE)
    most = MOST_SWEEPS * (blocks_for(config.max_positions) + lanes)
    num_blocks = min(settings.sweep_bytes // block_bytes, most)
    max_tokens = min(num_blocks * BLOCK_SIZE, config.max_positions)
    log.info("sweeps.ready", max_tokens=max_tokens, bytes=num_blocks * block_bytes)
    return num_blocks
