"""``local``: all experts are in this process."""

from functools import partial

from moesaic.dispatch.contract import Step
from moesaic.dispatch.local import LocalDispatcher, LocalStep
from moesaic.engine.shortcuts import LocalSteps, Shortcut
from moesaic.models.configuration.captured import captures
from moesaic.models.configuration.config import ModelConfig
from moesaic.models.layers.decode_graphs import DecodeGraphs
from moesaic.models.layers.kv_cache import KVCache
from moesaic.models.layers.static_decode import longest_context
from moesaic.models.layers.whole_steps import WholeSteps
from moesaic.native.own_thread import on_own_thread
from moesaic.services.attention.modes.contract import Mode, OpenMode, WorkerParts
from moesaic.services.attention.modes.offload import plan_offload
from moesaic.services.attention.settings import AttentionSettings


def plan_local(settings: AttentionSettings, config: ModelConfig) -> OpenMode:
    """Keep all experts in memory, or most of them in a file."""
    return plan_offload(settings, config) if settings.offload else open_local


async def open_local(worker: WorkerParts) -> Mode:
    """Read all experts."""
    dispatcher = await on_own_thread(
        LocalDispatcher,
        worker.checkpoint,
        worker.config,
        worker.dtype,
        worker.device,
        worker.settings.quantization,
    )
    experts = partial(dispatcher.dispatch, dispatcher.begin_step())
    return Mode(
        dispatcher,
        shortcut=partial(_shortcut, worker, dispatcher),
        experts=experts,
        degrading=dispatcher,
    )


def _shortcut(worker: WorkerParts, dispatcher: LocalDispatcher, cache: KVCache) -> Shortcut | None:
    settings, decoder = worker.settings, worker.decoder
    if settings.device == "cpu":

        def whole_of(step: Step) -> WholeSteps | None:
            assert isinstance(step, LocalStep)
            return decoder.whole_steps(cache, step.experts.kernels)

        return LocalSteps(whole_of) if whole_of(dispatcher.begin_step()) else None
    if not captures(settings):
        return None
    exact = partial(dispatcher.dispatch, dispatcher.begin_step())
    most_rows, max_length = settings.max_num_seqs, longest_context(decoder, cache)
    graphs = DecodeGraphs(decoder, cache, exact, most_rows, max_length)

    def graphs_of(step: Step) -> DecodeGraphs:
        if step.substitution is None:
            return graphs
        return graphs.degrading(partial(dispatcher.dispatch, step))

    return LocalSteps(graphs_of)
