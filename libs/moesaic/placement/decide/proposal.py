"""Proposals for a fleet: a placement if one is due, or the reason why there can be none."""

from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field

from moesaic.messages.placement import EMPTY_SLOT, PlacedWorker, Placement
from moesaic.messages.registry import WorkerRecord
from moesaic.placement.decide.coverage import missing_experts
from moesaic.placement.decide.pooled import fill
from moesaic.placement.decide.stand_ins import own_part
from moesaic.placement.policies.uniform import Slots, refill, uniform

LEAVING = ("draining", "standby")  # states of workers that leave if a placement names them

LITTLE_ROOM = "edge agents: room for"  # they serve nevertheless, with experts from their files


@dataclass(frozen=True)
class Proposal:
    """A placement that the fleet calls for, without united experts; without one, the scheduler only waits."""

    placement: Placement | None = None  # its epoch is 0; one is chosen when it is committed
    urgent: bool = False  # experts are missing or a worker leaves: do not let newcomers settle
    # More slots would help: for experts that are missing, or for a worker that wants to leave.
    short: bool = False
    waiting_for: list[str] = field(default_factory=list)  # for people


def propose(current: Placement | None, records: Iterable[WorkerRecord]) -> Proposal:
    """Compare the committed placement with the fleet.

    A placement is due when the placed workers are not those that can take one, or lack an expert, or
    cannot keep all their experts:

    =====================================  ==========================================================
    Event                                  Proposal
    =====================================  ==========================================================
    the first workers came                 all experts, dealt evenly
    a worker came or went                  workers keep their slots; only missing experts move
    a worker restarted                     it gets back its experts
    a worker drains                        a placement without it, unless its slots are needed
    a worker is on standby                 nothing for it, and none names it
    an edge agent has less memory now      it keeps as many experts as it has slots for
    stages ended before the last           the same, and experts that none of them had are placed
    workers with another model came        nothing for them while any worker has the served model
    =====================================  ==========================================================

    Args:
        current: the committed placement.
        records: records of the workers; attention workers name the requested model.
    """
    records = list(records)
    experts = [record for record in records if record.holds_experts]
    asked_for = {record.model_digest for record in records if record.takes_requests}
    missing = missing_experts(current, {r.incarnation for r in experts}) if current else {}
    current = own_part(current) if current else None
    placed = {w.incarnation for w in current.workers} if current else set()
    draining = [r for r in experts if r.state in LEAVING and r.incarnation in placed]
    ready = [r for r in experts if _can_be_placed(r)]
    served = _served_model(current, [*ready, *draining], asked_for)
    candidates = sorted(
        (r for r in [*ready, *draining] if r.model_digest == served), key=lambda r: r.worker_id
    )
    usable = _needed(current, candidates)
    waiting_for = [
        f"expert worker {r.worker_id}: has model {r.model_digest[:12]}, others have {served[:12]}"
        for r in sorted([*ready, *draining], key=lambda r: r.worker_id)
        if r.model_digest != served
    ]
    staying = [r for r in draining if r in usable]
    waiting_for += [
        f"expert worker {r.worker_id}: drains, but the others lack slots for its experts"
        for r in staying
    ]
    needed, too_full = bool(missing) or not current, _is_too_full(current, usable)
    if shortfall := _shortfall(current, usable):
        told = [shortfall] if needed or too_full else []
        return Proposal(short=needed, waiting_for=[*waiting_for, *told])
    if {r.incarnation for r in usable} == placed and not missing and not too_full:
        return Proposal(short=bool(staying), waiting_for=waiting_for)
    somebody_leaves = any(r not in usable for r in draining)
    return Proposal(
        _placement(current, usable), bool(missing) or somebody_leaves, bool(staying), waiting_for
    )


def obsolete(
    planned: Placement,
    current: Placement | None,
    records: Iterable[WorkerRecord],
    target: Placement | None = None,
) -> str:
    """Find out if a placement that is being prepared is still worth waiting for.

    It is not once one of its workers has gone, or drains and is not needed.

    Args:
        planned: the placement that is being prepared.
        current: the placement in force.
        records: records of the workers now.
        target: the last stage that ``planned`` leads to; workers that it leaves out may drain.

    Returns:
        The reason not to wait, for people; empty if there is none.
    """
    by_key = {record.incarnation: record for record in records}
    keys = [worker.incarnation for worker in planned.workers]
    lasting = [w.incarnation for w in (target or planned).workers]
    if gone := [key[0] for key in dict.fromkeys((*keys, *lasting)) if key not in by_key]:
        return f"{', '.join(gone)} left while experts were loaded"
    wanted = propose(current, by_key.values()).placement or current
    needed = {w.incarnation for w in wanted.workers} if wanted else set(keys)
    leaving = [key[0] for key in lasting if by_key[key].state in LEAVING and key not in needed]
    return f"{', '.join(leaving)} drains while experts are loaded" if leaving else ""


def _can_be_placed(record: WorkerRecord) -> bool:
    return record.state == "ready" and min(record.slots_per_layer, record.num_experts) > 0


def _served_model(
    current: Placement | None, candidates: Sequence[WorkerRecord], asked_for: Set[str]
) -> str:
    """Choose the model that is served.

    The placement's stays while any worker has it. Else it is the model that most slots are for, among
    those that attention workers have; without attention workers, among all.
    """
    slots: Counter[str] = Counter()
    for record in candidates:
        slots[record.model_digest] += record.slots_per_layer
    if current and (current.model_digest in slots or current.model_digest in asked_for):
        return current.model_digest
    among = slots.keys() & asked_for or slots.keys()
    return max(among, key=lambda digest: (slots[digest], digest), default="")


def _needed(current: Placement | None, candidates: Sequence[WorkerRecord]) -> list[WorkerRecord]:
    """Choose the ready workers, and as few of the draining ones as it takes to hold every expert.

    Returns:
        Their records, by worker id.
    """
    needed = [record for record in candidates if record.state == "ready"]
    for record in candidates:
        if record.state in LEAVING and _shortfall(current, needed):
            needed.append(record)
    return sorted(needed, key=lambda record: record.worker_id)


def _is_too_full(current: Placement | None, usable: Sequence[WorkerRecord]) -> bool:
    """True if an edge agent holds more than it has slots for."""
    if current is None:
        return False
    place = {w.incarnation: idx for idx, w in enumerate(current.workers)}
    return any(
        sum(expert != EMPTY_SLOT for layer in current.slots for expert in layer[place[key]])
        > record.capacity
        for record in usable
        if record.num_slots and (key := record.incarnation) in place
    )


def _shortfall(current: Placement | None, usable: Sequence[WorkerRecord]) -> str:
    """The reason why these workers cannot hold every expert, for people; empty if they can."""
    if usable:
        num_experts = usable[0].num_experts
    elif current:
        num_experts = current.num_experts
    else:
        return "expert workers: none registered"
    if any(record.num_slots for record in usable):
        room, needed = sum(r.capacity for r in usable), num_experts * len(usable[0].layers)
        return "" if room >= needed else f"{LITTLE_ROOM} {room} of {needed} experts"
    slots = sum(min(record.slots_per_layer, num_experts) for record in usable)
    if slots >= num_experts:
        return ""
    return f"expert workers: {slots} of {num_experts} slots per layer registered"


def _placement(current: Placement | None, usable: Sequence[WorkerRecord]) -> Placement:
    model = usable[0]
    pooled = any(record.num_slots for record in usable)
    if current and (current.model_digest, current.num_experts, current.layers) == (
        model.model_digest,
        model.num_experts,
        model.layers,
    ):
        held = _held(current, usable)
        slots = _filled(held, usable) if pooled else refill(model.num_experts, held)
    elif pooled:
        slots = _filled([[[] for _ in usable] for _ in model.layers], usable)
    else:
        slots = uniform(
            model.num_experts, len(model.layers), [record.slots_per_layer for record in usable]
        )
    return Placement(
        epoch=0,
        model_digest=model.model_digest,
        num_experts=model.num_experts,
        workers=[PlacedWorker.of(record) for record in usable],
        layers=list(model.layers),
        slots=slots,
    )


def _filled(held: list[Slots], usable: Sequence[WorkerRecord]) -> list[Slots]:
    return fill(usable[0].num_experts, held, [record.capacity for record in usable])


def _held(current: Placement, usable: Sequence[WorkerRecord]) -> list[Slots]:
    """Experts in each worker's slots, also from before a restart, cut or filled up to its slots.

    Returns:
        ``[L][N][slots]``; -1 is empty.
    """
    place = {worker.worker_id: idx for idx, worker in enumerate(current.workers)}
    return [
        [
            _fitted(layer[place[r.worker_id]] if r.worker_id in place else [], r.slots_per_layer)
            for r in usable
        ]
        for layer in current.slots
    ]


def _fitted(slots: Sequence[int], num_slots: int) -> list[int]:
    return [*slots[:num_slots], *[EMPTY_SLOT] * (num_slots - len(slots))]
