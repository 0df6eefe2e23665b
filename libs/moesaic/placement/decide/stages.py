"""Stages: a migration in steps, for workers whose memory cannot hold old and new experts together.

Experts of the placement in force stay in memory until the next one is in force. A stage therefore loads
the experts that fit. It drops experts that other workers hold by then, which makes room for the next stage.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from msgspec.structs import replace

from moesaic.errors import InvalidInput, PlacementInfeasible
from moesaic.messages.placement import EMPTY_SLOT, PlacedWorker, Placement
from moesaic.placement.decide.staging import Staging
from moesaic.placement.traffic.statistics import Floats


def stages(
    current: Placement,
    target: Placement,
    capacity: Mapping[str, int],
    value: Floats | None = None,
) -> list[Placement]:
    """Split a migration so that no worker ever has more experts in memory than it can.

    In every stage each expert has a holder, if it had one before. No worker loads again what it dropped.
    Experts whose arrival frees a full worker come first, then those of most ``value``. If full workers wait
    for each other, experts take a temporary place on workers that have room.

    Args:
        current: the placement in force.
        target: the placement to reach, of the same model, layers and substitution. Workers that restarted since
            ``current`` hold nothing. Workers that it leaves out live until the last stage, and load nothing.
        capacity: experts that a worker can have in memory at once, over all layers, by worker id.
        value: value of a copy of an expert, such as its demand: ``[N, L, E]``, by worker of ``target``.

    Returns:
        At least one placement, each with ``target``'s epoch, the last equal to it. A worker may for a while
        have more experts of a layer than before and after. Slots are ascending except in the last.

    Raises:
        InvalidInput: the placements are of different models, ``target`` lacks an expert, a worker's
            capacity is not known, or ``value`` has another shape.
        PlacementInfeasible: a worker lacks the capacity for one of the placements, or all workers are full
            and wait for each other.
    """
    kind = ("model_digest", "num_experts", "layers", "substitution", "num_united")
    if any(getattr(current, name) != getattr(target, name) for name in kind):
        raise InvalidInput(
            "target", "must be of the model, layers and substitution of the current placement"
        )
    if unknown := {w.worker_id for w in target.workers} - capacity.keys():
        raise InvalidInput("capacity", f"is unknown for {sorted(unknown)[:3]}")
    workers = [*target.workers, *_leavers(current, target)]
    room, goal = _room(target, workers, capacity), _held(target, workers)
    held = _held(current, workers)
    _require_possible(target, held, goal, room)
    worth = _worth(target, value)
    # Copies that only add to others fill the room that experts may need to get past each other. If
    # they may come at any time and that ends in a deadlock, they come last.
    for eager in (True, False):
        found = Staging(held, goal, room, len(target.workers), worth).way(eager)
        if found is not None:
            return [*(_placement(target, workers, held) for held in found[:-1]), target]
    # One free place anywhere would do.
    raise PlacementInfeasible(1, 0)


def _leavers(current: Placement, target: Placement) -> list[PlacedWorker]:
    staying = {worker.worker_id for worker in target.workers}
    return [worker for worker in current.workers if worker.worker_id not in staying]


def _held(placement: Placement, workers: Sequence[PlacedWorker]) -> list[set[int]]:
    """Experts of each of ``workers``, numbered through all layers."""
    held: dict[tuple[str, int], set[int]] = {}
    for n, worker in enumerate(placement.workers):
        held[worker.incarnation] = {
            layer_idx * placement.num_experts + expert
            for layer_idx, by_worker in enumerate(placement.slots)
            for expert in by_worker[n]
            if expert != EMPTY_SLOT
        }
    return [held.get(worker.incarnation, set()) for worker in workers]


def _room(
    target: Placement, workers: Sequence[PlacedWorker], capacity: Mapping[str, int]
) -> list[int | None]:
    num_staying = len(target.workers)
    return [
        capacity[worker.worker_id] if n < num_staying else None for n, worker in enumerate(workers)
    ]


def _require_possible(
    target: Placement, held: list[set[int]], goal: list[set[int]], room: list[int | None]
) -> None:
    lacking = set(range(len(target.layers) * target.num_experts)) - set().union(*goal)
    if lacking:
        layer_idx, expert = divmod(min(lacking), target.num_experts)
        where = f"expert {expert} of layer {target.layers[layer_idx]}"
        raise InvalidInput("target", f"must have every expert, but lacks {where}")
    missing = sum(
        max(0, len(now) - most, len(then) - most)
        for now, then, most in zip(held, goal, room, strict=True)
        if most is not None
    )
    if missing:
        raise PlacementInfeasible(missing, 0)


def _worth(target: Placement, value: Floats | None) -> Floats:
    """``value`` by worker and expert, numbered through all layers; united experts have none."""
    shape = (len(target.workers), len(target.layers), target.num_own)
    if value is None:
        value = np.zeros(shape)
    if value.shape != shape:
        raise InvalidInput("value", f"must be {shape}, got {value.shape}")
    padded = np.pad(value, [(0, 0), (0, 0), (0, target.num_united)])
    return padded.reshape(shape[0], -1)


def _placement(target: Placement, workers: list[PlacedWorker], held: list[set[int]]) -> Placement:
    slots: list[list[list[int]]] = [[[] for _ in workers] for _ in target.layers]
    for n, experts in enumerate(held):
        for expert in sorted(experts):
            layer_idx, own = divmod(expert, target.num_experts)
            slots[layer_idx][n].append(own)
    return replace(target, workers=workers, slots=slots)
