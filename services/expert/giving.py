"""Gives attention workers the experts in this worker's slots, on a thread of its own: the engine may be computing."""

from contextlib import AsyncExitStack

import torch

from moesaic.dispatch.gathered.holder import PULL_LIMITS, Holder, pull_digest
from moesaic.dispatch.gathered.plan import Share, StreamPlan
from moesaic.dispatch.gathered.shard import SlotShard
from moesaic.dispatch.host import ExpertHost
from moesaic.engine.thread import engine_thread
from moesaic.kernels.expert_layout import ExpertLayout
from moesaic.kernels.own_thread import on_own_thread
from moesaic.models.config import ModelConfig
from moesaic.transport.ucx import UcxNetwork
from services.expert.settings import ExpertSettings


async def give_experts(
    settings: ExpertSettings,
    worker_id: str,
    config: ModelConfig,
    host: ExpertHost,
    parts: AsyncExitStack,
) -> str:
    """Listen until ``parts`` end, and return the address; empty on a GPU, whose experts stay there."""
    if settings.device != "cpu":
        return ""
    holder = await on_own_thread(_holder, settings, config, host)
    thread = await parts.enter_async_context(engine_thread(torch.device("cpu"), "giver"))

    async def listen() -> tuple[UcxNetwork, str]:
        network = UcxNetwork(
            worker_id,
            "expert",
            settings.secret.get_secret_value().encode(),
            PULL_LIMITS,
            transports=settings.transports,
            own_address=settings.data.host,
        )
        address = await network.listen(settings.data.host, settings.weights_port, holder.answer)
        return network, address

    network, address = await thread.run(listen())
    parts.push_async_callback(lambda: thread.run(network.close()))
    return settings.data.advertised(address)


def _holder(settings: ExpertSettings, config: ModelConfig, host: ExpertHost) -> Holder:
    """Packs one expert to learn its size: on a thread of its own, please."""
    dtype = getattr(torch, settings.dtype)
    size = config.moe.expert_size
    layout = ExpertLayout(config.hidden_size, size, dtype, settings.quantization)
    plan = StreamPlan(
        config.moe_layers,
        config.moe.num_experts,
        layout.nbytes,
        Share(),
        offload=False,
        window=1,
    )
    return Holder(
        plan, SlotShard(host.packed, layout.nbytes), pull_digest(config.digest, layout, Share())
    )
