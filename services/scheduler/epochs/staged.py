"""Placing in stages, for workers without memory for both the old and the new experts of a migration."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import structlog
from msgspec.structs import replace

from moesaic.cluster.placement_view import PlacementView
from moesaic.cluster.registry import Fleet
from moesaic.errors import PlacementInfeasible
from moesaic.messages.placement import Placement
from moesaic.messages.registry import WorkerRecord
from moesaic.placement.decide.stages import stages
from moesaic.services.scheduler.epochs.confirmation import Confirmation
from moesaic.services.scheduler.epochs.placer import Placer

log = structlog.get_logger()

# Between stages: agents free an epoch three seconds after the next, looking four times a second.
REST_S = 4.0
TRIES = 4  # of a stage that some agent has no memory for yet

Begun = Callable[[int], Awaitable[None]]


async def place_in_stages(
    placer: Placer,
    confirmation: Confirmation,
    fleet: Fleet,
    view: PlacementView,
    wanted: Placement,
    *,
    urgent: bool,
    begun: Begun,
) -> Placement:
    """Make ``wanted`` the placement, at once or step by step; see ``Placer.place``.

    If a stage fails, the one before stays in force. It has every expert that any worker had, and a later plan
    continues from there.
    """
    current, records = view.current, list(fleet.workers.values())
    *before, last = stages_of(current, wanted, records)
    if before:
        log.info("placement.staged", stages=len(before) + 1)
    for step in before:
        # What becomes of the decision is known by the epoch of the last.
        placed = await _placed(placer, fleet, step, wanted, urgent=urgent, begun=_is_a_stage)
        # Only when all use it does any of them free what it replaced.
        while not await confirmation.confirm(placed):
            placer.require_wanted(placed, wanted)
        await _rest(placer, fleet, placed, wanted)
    return await _placed(placer, fleet, last, None, urgent=urgent, begun=begun)


async def _placed(
    placer: Placer,
    fleet: Fleet,
    step: Placement,
    target: Placement | None,
    *,
    urgent: bool,
    begun: Begun,
) -> Placement:
    for _ in range(TRIES - 1):
        try:
            return await placer.place(step, urgent=urgent, begun=begun, target=target)
        except PlacementInfeasible:  # an epoch that others still ask for keeps its experts
            await _rest(placer, fleet, step, target)
    return await placer.place(step, urgent=urgent, begun=begun, target=target)


async def _is_a_stage(_epoch: int) -> None:
    """Note nothing."""


async def _rest(
    placer: Placer, fleet: Fleet, placement: Placement, target: Placement | None
) -> None:
    """Wait for ``REST_S``, as long as the placement is wanted."""
    with suppress(TimeoutError):
        async with asyncio.timeout(REST_S):
            while True:
                seen = fleet.version
                placer.require_wanted(placement, target)
                await fleet.changed(seen)


def stages_of(
    current: Placement | None, wanted: Placement, records: Sequence[WorkerRecord]
) -> list[Placement]:
    """Split a migration so that it fits into every worker's memory.

    Raises:
        PlacementInfeasible: no sequence of steps fits.
    """
    live = {record.incarnation: record for record in records}
    by_id = {record.worker_id: record for record in records}
    placed = [by_id.get(worker.worker_id) for worker in wanted.workers]
    if current is None or not any(record and record.num_slots for record in placed):
        return [wanted]
    base = _without(current, {w.incarnation for w in current.workers} - live.keys())
    kind = ("model_digest", "num_experts", "layers", "substitution", "num_united")
    if not base.workers or any(getattr(base, name) != getattr(wanted, name) for name in kind):
        return [wanted]
    capacity = {record.worker_id: record.most_held for record in records if record.holds_experts}
    return stages(replace(base, epoch=0), wanted, capacity)


def _without(placement: Placement, gone: set[tuple[str, int]]) -> Placement:
    """Leave out workers that are gone; their sole experts then have no holder."""
    kept = [n for n, worker in enumerate(placement.workers) if worker.incarnation not in gone]
    return replace(
        placement,
        workers=[placement.workers[n] for n in kept],
        slots=[[by_worker[n] for n in kept] for by_worker in placement.slots],
    )
