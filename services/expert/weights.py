"""Gives experts to peers on a thread and an address of its own: the engine may be computing.

On a GPU the thread has a stream of its own too: it waits for its copies, not for the engine's kernels.
"""

from contextlib import AsyncExitStack

import torch

from moesaic.engine.thread import engine_thread
from moesaic.experts.host import ExpertHost
from moesaic.experts.pull.frames import PULL_LIMITS, contents_digest
from moesaic.experts.pull.loader import ExpertPeers
from moesaic.experts.pull.ranges import Share
from moesaic.experts.pull.server import PullServer
from moesaic.experts.pull.shard import SlotShard
from moesaic.messages.substitution import MOST_WAY
from moesaic.models.configuration.config import ModelConfig
from moesaic.native.own_thread import on_own_thread
from moesaic.settings import ModelSettings
from moesaic.transport.ucx.opening import open_network


async def give_experts(
    settings: ModelSettings,
    port: int,
    config: ModelConfig,
    host: ExpertHost,
    parts: AsyncExitStack,
) -> tuple[str, ExpertPeers]:
    """Give experts from the slots of ``host`` to peers that ask on ``port``, until ``parts`` end.

    Returns:
        The address, and the peers to pull from.
    """
    layout, device = host.files.layout, host.files.device
    # Packs an expert
    digest = await on_own_thread(contents_digest, config.digest, layout, Share())
    # Ids of united experts are behind the own ones, way by way.
    num_bytes = (MOST_WAY + 1) * config.moe.num_experts * layout.nbytes
    server = PullServer(
        config.moe_layers, num_bytes, SlotShard(host.epochs.held, layout.nbytes), digest
    )
    thread = await parts.enter_async_context(engine_thread(device, "weights"))
    if device.type == "cuda":
        await thread.build(_use_own_stream, device)
    network = await parts.enter_async_context(
        open_network(settings, "expert", config.digest, PULL_LIMITS, thread.run, device)
    )
    peers = await thread.build(
        ExpertPeers, network.network, settings.worker_id, layout, config.digest, device
    )
    return await network.listen(port, server.answer), peers


def _use_own_stream(device: torch.device) -> None:
    torch.cuda.set_stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]  # torch has no type for it
