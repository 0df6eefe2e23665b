"""``routed`` with experts beside it: each step sends rows out, or brings experts to them."""

from functools import partial

from moesaic.dispatch.either.dispatcher import ChoosingDispatcher
from moesaic.dispatch.gathered.holders import PlacedHolders
from moesaic.dispatch.gathered.plan import GatherPlan
from moesaic.experts.pull.frames import PULL_LIMITS
from moesaic.models.configuration.config import ModelConfig
from moesaic.services.attention.modes.assembly import (
    Gathered,
    measured,
    open_mover,
    plan_experts,
    with_experts,
)
from moesaic.services.attention.modes.contract import Mode, OpenMode, WorkerParts
from moesaic.services.attention.modes.expert_workers import link_expert_workers
from moesaic.services.attention.modes.peers import follow_placement
from moesaic.services.attention.settings import AttentionSettings


def plan_either(settings: AttentionSettings, config: ModelConfig) -> OpenMode:
    """Plan for experts that come from expert workers."""
    return partial(_open_either, plan_experts(settings, config, pool=True))


async def _open_either(plan: GatherPlan, worker: WorkerParts) -> Mode:
    mover = await open_mover(worker)
    network = await worker.open_network(PULL_LIMITS, mover)
    gathered = await with_experts(worker, plan, mover, network)
    _, routed = await link_expert_workers(worker)
    dispatcher = ChoosingDispatcher(
        routed, gathered.dispatcher, num_layers=len(worker.config.moe_layers)
    )
    start = partial(_start, worker, gathered)
    return Mode(dispatcher, start=start, degrading=gathered.dispatcher)


async def _start(worker: WorkerParts, gathered: Gathered) -> float:
    holders = gathered.parts.holders
    assert isinstance(holders, PlacedHolders)  # the plan says that they are
    await follow_placement(worker, gathered.mover, holders)
    await gathered.complete(worker, "expert workers")
    await measured(worker, gathered)
    return 0.0  # a step that transfers would slow goes the other way
