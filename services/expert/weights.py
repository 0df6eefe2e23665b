"""Experts come and go on a thread of their own, at an address of its own: the engine may be computing."""

from contextlib import AsyncExitStack

import torch

from moesaic.dispatch.gathered.holder import PULL_LIMITS, Holder, pull_digest
from moesaic.dispatch.gathered.plan import Share
from moesaic.dispatch.gathered.shard import SlotShard
from moesaic.dispatch.host import ExpertHost
from moesaic.dispatch.loading.peers import Peers
from moesaic.engine.thread import engine_thread
from moesaic.kernels.own_thread import on_own_thread
from moesaic.models.config import ModelConfig
from moesaic.transport.ucx import UcxNetwork
from services.expert.settings import ExpertSettings


async def exchange_experts(
    settings: ExpertSettings,
    worker_id: str,
    config: ModelConfig,
    host: ExpertHost,
    parts: AsyncExitStack,
) -> tuple[str, Peers | None]:
    """Give experts from the slots of ``host`` to whoever asks, until ``parts`` end.

    Returns:
        The address, and what asks peers for theirs; neither on a GPU, whose experts stay there.
    """
    layout = host.files.layout
    if layout is None:
        return "", None
    digest = await on_own_thread(pull_digest, config.digest, layout, Share())  # packs an expert
    num_bytes = config.moe.num_experts * layout.nbytes
    holder = Holder(config.moe_layers, num_bytes, SlotShard(host.held, layout.nbytes), digest)
    thread = await parts.enter_async_context(engine_thread(torch.device("cpu"), "weights"))

    async def listen() -> tuple[UcxNetwork, Peers, str]:
        network = UcxNetwork(
            worker_id,
            "expert",
            settings.secret.get_secret_value().encode(),
            PULL_LIMITS,
            transports=settings.transports,
            own_address=settings.data.host,
        )
        peers = Peers(network, worker_id, layout, config.digest)
        address = await network.listen(settings.data.host, settings.weights_port, holder.answer)
        return network, peers, address

    network, peers, address = await thread.run(listen())
    parts.push_async_callback(lambda: thread.run(network.close()))
    return settings.data.advertised(address), peers
