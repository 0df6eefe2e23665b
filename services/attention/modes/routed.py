"""``routed``: rows go to expert workers."""

from functools import partial

from moesaic.dispatch.routed.dispatcher import RoutedDispatcher
from moesaic.dispatch.routed.whole_steps import RoutedSteps
from moesaic.engine.shortcuts import SegmentedSteps, Shortcut
from moesaic.models.configuration.captured import captures
from moesaic.models.configuration.config import ModelConfig
from moesaic.models.layers.decode_segments import DecodeSegments
from moesaic.models.layers.kv_cache import KVCache
from moesaic.models.layers.static_decode import longest_context
from moesaic.services.attention.modes.contract import Mode, OpenMode, WorkerParts
from moesaic.services.attention.modes.expert_workers import experts_placed, link_expert_workers
from moesaic.services.attention.modes.two_phase import join_node
from moesaic.services.attention.settings import AttentionSettings


def plan_routed(settings: AttentionSettings, config: ModelConfig) -> OpenMode:
    """Send all rows to expert workers."""
    return open_routed


async def open_routed(worker: WorkerParts) -> Mode:
    """Link the expert workers, and this node's other attention workers where rows travel together."""
    network, dispatcher = await link_expert_workers(worker)
    address = await join_node(worker, network, dispatcher)
    await experts_placed(worker)
    return Mode(
        dispatcher,
        address,
        shortcut=partial(_shortcut, worker, dispatcher),
    )


def _shortcut(worker: WorkerParts, dispatcher: RoutedDispatcher, cache: KVCache) -> Shortcut | None:
    settings, decoder = worker.settings, worker.decoder
    if settings.device != "cpu":
        return _segments(worker, dispatcher, cache) if captures(settings) else None
    whole = decoder.whole_steps(cache)
    if whole is None:
        return None
    return RoutedSteps(dispatcher, whole, worker.config.hidden_size)


def _segments(worker: WorkerParts, dispatcher: RoutedDispatcher, cache: KVCache) -> Shortcut:
    settings, decoder = worker.settings, worker.decoder
    max_length = longest_context(decoder, cache)
    segments = DecodeSegments(decoder, cache, settings.max_num_seqs, max_length)
    return SegmentedSteps(segments, dispatcher)
