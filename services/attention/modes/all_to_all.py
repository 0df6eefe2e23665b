"""``all-to-all``, the baseline: all attention workers compute each layer together."""

from functools import partial

from moesaic.dispatch.baselines.all_to_all import AllToAllDispatcher
from moesaic.dispatch.routed.native import ROWS_PER_TIMEOUT
from moesaic.experts.pull.ranges import Share
from moesaic.models.configuration.config import ModelConfig
from moesaic.native.own_thread import on_own_thread
from moesaic.services.attention.modes.contract import Mode, OpenMode, WorkerParts
from moesaic.services.attention.modes.peers import follow_fleet, share_peers
from moesaic.services.attention.settings import AttentionSettings
from moesaic.transport.frame import FrameLimits


def plan_all_to_all(settings: AttentionSettings, config: ModelConfig) -> OpenMode:
    """Plan nothing."""
    return _open_all_to_all


async def _open_all_to_all(worker: WorkerParts) -> Mode:
    """Read the share, and listen to the others on the engine's event loop."""
    settings, config, thread = worker.settings, worker.config, worker.thread
    dispatcher = await on_own_thread(
        AllToAllDispatcher,
        worker.checkpoint,
        config,
        Share.parse(settings.share),
        worker.dtype,
        settings.quantization,
    )
    network = await worker.open_network(FrameLimits.of_hidden_size(config.hidden_size), thread)
    largest = max(1.0, settings.max_num_batched_tokens / ROWS_PER_TIMEOUT)
    await thread.build(dispatcher.connect, network.network, settings.expert_timeout_s * largest)
    worker.process.parts.push_async_callback(lambda: thread.run(dispatcher.close()))
    address = await network.listen(settings.data_port, dispatcher.answer)
    return Mode(dispatcher, address, settings.share, start=partial(_start, worker, dispatcher))


async def _start(worker: WorkerParts, dispatcher: AllToAllDispatcher) -> float:
    await follow_fleet(worker, worker.thread, share_peers, dispatcher.set_peers)
    # Nothing is measured
    return 0.0
