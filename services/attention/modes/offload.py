"""``local --offload``: most experts are in a file, and come layer by layer."""

from functools import partial

from moesaic.dispatch.gathered.plan import GatherPlan
from moesaic.models.configuration.config import ModelConfig
from moesaic.services.attention.modes.assembly import (
    measured,
    open_mover,
    plan_experts,
    with_experts,
)
from moesaic.services.attention.modes.contract import Mode, OpenMode, WorkerParts
from moesaic.services.attention.settings import AttentionSettings


def plan_offload(settings: AttentionSettings, config: ModelConfig) -> OpenMode:
    """Plan for experts that all come from this worker's own file."""
    return partial(open_offload, plan_experts(settings, config))


async def open_offload(plan: GatherPlan, worker: WorkerParts) -> Mode:
    """Write the file, and read what stays in memory."""
    gathered = await with_experts(worker, plan, await open_mover(worker))
    dispatcher, start = gathered.dispatcher, partial(measured, worker, gathered)
    return Mode(dispatcher, start=start, experts=dispatcher.made_up, degrading=dispatcher)
