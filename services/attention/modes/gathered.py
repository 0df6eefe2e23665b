"""``gathered``: experts come to rows, from the attention workers that hold the other shares."""

from functools import partial

from moesaic.dispatch.gathered.holders import ShareHolders
from moesaic.dispatch.gathered.plan import GatherPlan
from moesaic.experts.pull.frames import PULL_LIMITS
from moesaic.experts.pull.ranges import Share
from moesaic.models.configuration.config import ModelConfig
from moesaic.services.attention.modes.assembly import (
    Gathered,
    measured,
    open_mover,
    plan_experts,
    with_experts,
)
from moesaic.services.attention.modes.contract import Mode, OpenMode, WorkerParts
from moesaic.services.attention.modes.offload import open_offload
from moesaic.services.attention.modes.peers import follow_fleet, share_peers
from moesaic.services.attention.settings import AttentionSettings


def plan_gathered(settings: AttentionSettings, config: ModelConfig) -> OpenMode:
    """Plan for a share of the experts here; the only share needs no peers."""
    plan = plan_experts(settings, config, Share.parse(settings.share))
    return partial(_open_gathered if plan.share.count > 1 else open_offload, plan)


async def _open_gathered(plan: GatherPlan, worker: WorkerParts) -> Mode:
    mover = await open_mover(worker)
    network = await worker.open_network(PULL_LIMITS, mover)
    gathered = await with_experts(worker, plan, mover, network)
    address = await network.listen(worker.settings.data_port, gathered.parts.server.answer)
    start = partial(_start, worker, gathered)
    dispatcher = gathered.dispatcher
    return Mode(
        dispatcher,
        address,
        str(plan.share),
        start=start,
        experts=dispatcher.made_up,
        degrading=dispatcher,
    )


async def _start(worker: WorkerParts, gathered: Gathered) -> float:
    holders = gathered.parts.holders
    # The plan says that they are.
    assert isinstance(holders, ShareHolders)
    await follow_fleet(worker, gathered.mover, share_peers, holders.set_peers)
    others = f"attention workers with the other shares of {gathered.parts.plan.share}"
    await gathered.complete(worker, others)
    return await measured(worker, gathered)
