"""Should there be a new placement, and which? If none can be made, what is missing?"""

from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field

from moesaic.messages.placement import EMPTY_SLOT, PlacedWorker, Placement
from moesaic.messages.registry import WorkerRecord
from moesaic.placement.coverage import missing_experts
from moesaic.placement.uniform import Slots, refill, uniform

Incarnation = tuple[str, int]  # worker id and generation: one start of one worker


@dataclass(frozen=True)
class Decision:
    """What to do now: make ``proposal`` the placement, or, if there is none, wait."""

    proposal: Placement | None = None  # its epoch is 0; whoever commits it chooses one
    urgent: bool = False  # experts are missing or a worker leaves: do not let newcomers settle
    short: bool = (
        False  # more slots would help: for experts that are missing, or who wants to leave
    )
    waiting_for: list[str] = field(default_factory=list)  # for people


def decide(current: Placement | None, records: Iterable[WorkerRecord]) -> Decision:
    """Compare the committed placement with the expert workers there are.

    A placement is due when the workers that can take one are not those that are placed: the first
    ones came, one came or went, or one restarted and lost what it held. Workers keep the slots
    they had; one that restarted gets back what it had. One that drains leaves the placement, unless
    its slots are needed. The model is the one that is served while any expert or attention worker
    has it: a stranger with another one does not take over while all others start anew.
    """
    records = list(records)
    experts = [record for record in records if record.role == "expert"]
    asked_for = {record.model_digest for record in records if record.role == "attention"}
    missing = missing_experts(current, {incarnation(r) for r in experts}) if current else {}
    placed = {(w.worker_id, w.generation) for w in current.workers} if current else set()
    draining = [r for r in experts if r.state == "draining" and incarnation(r) in placed]
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
    needed = bool(missing) or not current
    if shortfall := _shortfall(current, usable):
        return Decision(
            short=needed, waiting_for=[*waiting_for, shortfall] if needed else waiting_for
        )
    if {incarnation(r) for r in usable} == placed:
        return Decision(short=bool(staying), waiting_for=waiting_for)
    somebody_leaves = any(r not in usable for r in draining)
    return Decision(
        _propose(current, usable), bool(missing) or somebody_leaves, bool(staying), waiting_for
    )


def obsolete(planned: Placement, current: Placement | None, records: Iterable[WorkerRecord]) -> str:
    """Why a placement that is being prepared should not be waited for; empty if it should.

    One of its workers has gone, or drains and is not needed.

    Args:
        planned: what is being prepared.
        current: the placement in force.
        records: the workers there are now.
    """
    by_key = {incarnation(record): record for record in records}
    keys = [(worker.worker_id, worker.generation) for worker in planned.workers]
    if gone := [
        worker_id for worker_id, generation in keys if (worker_id, generation) not in by_key
    ]:
        return f"{', '.join(gone)} left while experts were loaded"
    wanted = decide(current, by_key.values()).proposal or current
    needed = {(w.worker_id, w.generation) for w in wanted.workers} if wanted else set(keys)
    leaving = [key[0] for key in keys if by_key[key].state == "draining" and key not in needed]
    return f"{', '.join(leaving)} drains while experts are loaded" if leaving else ""


def incarnation(record: WorkerRecord) -> Incarnation:
    """Which start of which worker this is."""
    return record.worker_id, record.generation


def _can_be_placed(record: WorkerRecord) -> bool:
    return record.state == "ready" and min(record.slots_per_layer, record.num_experts) > 0


def _served_model(
    current: Placement | None, candidates: Sequence[WorkerRecord], asked_for: Set[str]
) -> str:
    """The placement's model while anyone has it; else, of those that attention workers have or, if
    there are none, of all, the one that most slots are for."""
    slots: Counter[str] = Counter()
    for record in candidates:
        slots[record.model_digest] += record.slots_per_layer
    if current and (current.model_digest in slots or current.model_digest in asked_for):
        return current.model_digest
    among = slots.keys() & asked_for or slots.keys()
    return max(among, key=lambda digest: (slots[digest], digest), default="")


def _needed(current: Placement | None, candidates: Sequence[WorkerRecord]) -> list[WorkerRecord]:
    """Those that are ready, and of those that drain only as many as it takes to hold every
    expert, by worker id."""
    needed = [record for record in candidates if record.state == "ready"]
    for record in candidates:
        if record.state == "draining" and _shortfall(current, needed):
            needed.append(record)
    return sorted(needed, key=lambda record: record.worker_id)


def _shortfall(current: Placement | None, usable: Sequence[WorkerRecord]) -> str:
    """Why these workers cannot hold every expert, for people; empty if they can."""
    if usable:
        num_experts = usable[0].num_experts
    elif current:
        num_experts = current.num_experts
    else:
        return "expert workers: none registered"
    slots = sum(min(record.slots_per_layer, num_experts) for record in usable)
    if slots >= num_experts:
        return ""
    return f"expert workers: {slots} of {num_experts} slots per layer registered"


def _propose(current: Placement | None, usable: Sequence[WorkerRecord]) -> Placement:
    model = usable[0]
    if current and (current.model_digest, current.num_experts, current.layers) == (
        model.model_digest,
        model.num_experts,
        model.layers,
    ):
        slots = refill(model.num_experts, _held(current, usable))
    else:
        slots = uniform(
            model.num_experts, len(model.layers), [record.slots_per_layer for record in usable]
        )
    return Placement(
        epoch=0,
        model_digest=model.model_digest,
        num_experts=model.num_experts,
        workers=[
            PlacedWorker(
                worker_id=record.worker_id,
                generation=record.generation,
                admin_address=record.admin_address,
                data_address=record.data_address,
                weights_address=record.weights_address,
                ridge_rows=record.ridge_rows,
                node=record.node,
            )
            for record in usable
        ],
        layers=list(model.layers),
        slots=slots,
    )


def _held(current: Placement, usable: Sequence[WorkerRecord]) -> list[Slots]:
    """What each worker holds, or held before it restarted, cut or filled up to its slots."""
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
