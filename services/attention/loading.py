"""The model of a worker: checked before anything listens, then loaded."""

from collections.abc import Awaitable
from dataclasses import replace
from functools import partial

from moesaic.cluster.service import Process
from moesaic.engine.thread import engine_thread
from moesaic.models.configuration.config import ModelConfig
from moesaic.models.configuration.context import with_context
from moesaic.models.layers.decoder import Decoder
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.models.weights.served import find_served_model, held_dtype
from moesaic.native.library import require_library
from moesaic.native.own_thread import on_own_thread
from moesaic.services.attention.modes.contract import WorkerParts
from moesaic.services.attention.ranks import division_of, ranks, share_threads
from moesaic.services.attention.settings import AttentionSettings
from moesaic.transport.device_memory import device_named


def find_model(settings: AttentionSettings) -> tuple[ModelConfig, Checkpoint]:
    """Refuse what cannot be served before anything listens: see ``find_served_model``."""
    config, checkpoint = find_served_model(settings)
    if settings.deterministic:
        require_library("--deterministic")
    share_threads(division_of(settings, config))
    return with_context(config, settings.max_model_len), checkpoint


async def load_worker(
    process: Process[AttentionSettings],
    config: ModelConfig,
    checkpoint: Checkpoint,
    weights_digest: Awaitable[str],
) -> WorkerParts:
    """Start the engine's thread, and read all weights but those of routed experts."""
    settings, device = process.settings, device_named(process.settings.device)
    process.status.progress = checkpoint.progress
    thread = await process.enter(engine_thread(device))
    division = division_of(settings, config)
    meeting = (
        await process.enter(ranks(settings, division, config.config_digest)) if division else None
    )
    decoder = await on_own_thread(
        partial(Decoder.load, division=division),
        checkpoint,
        config,
        held_dtype(settings, config),
        device,
        settings.quantization,
    )
    if meeting:
        decoder = await meeting.led(decoder, thread)
    config = replace(config, weights_digest=await weights_digest)
    process.status.model_digest = config.digest
    return WorkerParts(process, config, checkpoint, decoder, thread)
