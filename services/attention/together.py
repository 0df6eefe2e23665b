"""``all-to-all`` in an attention worker: the baseline in which all workers compute each layer together."""

from contextlib import AsyncExitStack
from dataclasses import dataclass

import torch

from moesaic.cluster.bus import Bus
from moesaic.dispatch.all_to_all import AllToAllDispatcher
from moesaic.dispatch.gathered.plan import Share
from moesaic.dispatch.routed import ROWS_PER_TIMEOUT
from moesaic.engine.thread import EngineThread
from moesaic.kernels.own_thread import on_own_thread
from moesaic.models.checkpoint import Checkpoint
from moesaic.models.config import ModelConfig
from moesaic.models.decoder import Decoder
from moesaic.transport.frame import FrameLimits
from moesaic.transport.ucx import UcxNetwork
from services.attention.peers import follow_peers
from services.attention.settings import AttentionSettings


@dataclass(frozen=True)
class Together:
    """What an attention worker has of ``all-to-all``."""

    settings: AttentionSettings
    config: ModelConfig
    parts: AsyncExitStack  # of the worker
    dispatcher: AllToAllDispatcher
    data_address: str

    @property
    def share(self) -> str:
        """The experts that this worker computes."""
        return self.settings.share

    async def start(
        self, bus: Bus, engine: EngineThread, decoder: Decoder, waiting_for: list[str]
    ) -> float:
        """Find the others, now and later. Nothing is measured: returns 0."""
        tell = self.dispatcher.set_peers
        await follow_peers(bus, self.settings, self.config.digest, self.parts, engine, tell)
        return 0.0


async def open_together(
    settings: AttentionSettings,
    config: ModelConfig,
    checkpoint: Checkpoint,
    engine: EngineThread,
    parts: AsyncExitStack,
) -> Together:
    """Read the share, and listen to the others on the engine's event loop."""
    dispatcher = await on_own_thread(
        AllToAllDispatcher,
        checkpoint,
        config,
        Share.parse(settings.share),
        getattr(torch, settings.dtype),
        settings.quantization,
    )

    async def listen() -> tuple[UcxNetwork, str]:
        network = UcxNetwork(
            settings.worker_id,
            "attention",
            settings.secret.get_secret_value().encode(),
            FrameLimits.of_hidden_size(config.hidden_size),
            transports=settings.transports,
            own_address=settings.data.host,
        )
        largest = max(1.0, settings.max_num_batched_tokens / ROWS_PER_TIMEOUT)
        dispatcher.connect(network, settings.expert_timeout_s * largest)
        where = settings.data
        return network, await network.listen(where.host, settings.data_port, dispatcher.answer)

    network, bound = await engine.run(listen())
    parts.push_async_callback(lambda: engine.run(network.close()))
    parts.push_async_callback(lambda: engine.run(dispatcher.close()))
    return Together(settings, config, parts, dispatcher, settings.data.advertised(bound))
