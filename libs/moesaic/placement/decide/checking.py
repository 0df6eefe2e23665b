"""Rules that every placement must keep, checked before it is prepared.

This module shares no code with solvers: a solver must not check its own mistakes.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Set

from moesaic.messages.placement import Placement
from moesaic.messages.registry import WorkerRecord

MAX_NAMED = 3  # examples of one kind of violation


def violations(
    target: Placement,
    records: Iterable[WorkerRecord],
    current: Placement | None,
    *,
    is_stage: bool = False,
) -> list[str]:
    """Find the rules that ``target`` breaks.

    - Every expert of every layer has a replica.
    - No worker holds an expert twice. Without united experts, no worker has more slots than it
      registered, per layer or over all layers.
    - All workers live and have the model.
    - The experts that a worker holds before and after fit into its memory at the same time.

    Args:
        target: the placement, with any epoch.
        records: the workers there are.
        current: the placement in force, whose experts stay until ``target`` has replaced it.
        is_stage: other stages follow; ``target`` may lack experts that no live worker has under
            ``current``.

    Returns:
        A sentence for people about each broken rule; empty if ``target`` may be put in force.
    """
    by_key = {record.incarnation: record for record in records}
    found = _shape(target)
    if found:
        return found
    found += [
        f"worker {worker.worker_id} is not registered in generation {worker.generation}"
        for worker in target.workers
        if worker.incarnation not in by_key
    ]
    if found:
        return found
    placed = [by_key[worker.incarnation] for worker in target.workers]
    for record in placed:
        if record.model_digest != target.model_digest:
            found.append(f"worker {record.worker_id} has another model")
        if record.num_experts != target.num_own or record.layers != target.layers:
            found.append(f"worker {record.worker_id} has other layers or another number of experts")
    lost = _lost(current, by_key.keys()) if is_stage and current else frozenset()
    found += _of_layers(target, placed, lost) + _of_totals(target, placed)
    return found + _of_memory(target, placed, current)


def _shape(target: Placement) -> list[str]:
    names = Counter(worker.worker_id for worker in target.workers)
    found = [f"worker {name} is named {times} times" for name, times in names.items() if times > 1]
    if not target.workers or not target.layers:
        found.append("it has no workers or no layers")
    if len(target.slots) != len(target.layers) or len(set(target.layers)) != len(target.layers):
        found.append(f"it has slots of {len(target.slots)} layers for {len(target.layers)}")
    if any(len(by_worker) != len(target.workers) for by_worker in target.slots):
        found.append("a layer has slots of another number of workers")
    return found


def _lost(current: Placement, live: Set[tuple[str, int]]) -> frozenset[tuple[int, int]]:
    """Layers and experts that no live worker holds."""
    lives = [worker.incarnation in live for worker in current.workers]
    return frozenset(
        (layer, expert)
        for layer, by_worker in zip(current.layers, current.slots, strict=True)
        for expert in range(current.num_experts)
        if not any(lives[n] and expert in slots for n, slots in enumerate(by_worker))
    )


def _of_layers(
    target: Placement, placed: list[WorkerRecord], lost: Set[tuple[int, int]]
) -> list[str]:
    kinds: dict[str, list[str]] = {}

    def note(kind: str, example: str) -> None:
        kinds.setdefault(kind, []).append(example)

    for layer, by_worker in zip(target.layers, target.slots, strict=True):
        replicas: Counter[int] = Counter()
        for record, slots in zip(placed, by_worker, strict=True):
            here = [expert for expert in slots if expert >= 0]
            where = f"layer {layer} of {record.worker_id}"
            if sum(expert < target.num_own for expert in slots) > record.slots_per_layer:
                note("more slots than there are", where)
            if len(set(here)) != len(here):
                note("an expert twice", where)
            if any(not -1 <= expert < target.num_experts for expert in slots):
                note("an expert that does not exist", where)
            replicas.update(set(here))
        lacking = [
            expert
            for expert in range(target.num_experts)
            if not replicas[expert] and (layer, expert) not in lost
        ]
        if lacking:
            note("an expert without a replica", f"layer {layer}: {lacking[:MAX_NAMED]}")
    return [
        f"{kind}: {'; '.join(examples[:MAX_NAMED])}"
        + (f" and {len(examples) - MAX_NAMED} more" if len(examples) > MAX_NAMED else "")
        for kind, examples in kinds.items()
    ]


def _of_totals(target: Placement, placed: list[WorkerRecord]) -> list[str]:
    found = []
    for idx, record in enumerate(placed):
        here = sum(0 <= e < target.num_own for layer in target.slots for e in layer[idx])
        if record.num_slots and here > record.most_held:
            found.append(f"worker {record.worker_id} has {here} of {record.most_held} experts")
    return found


def _of_memory(
    target: Placement, placed: list[WorkerRecord], current: Placement | None
) -> list[str]:
    found = []
    before = _held(current) if current else {}
    after = _held(target)
    for record in placed:
        if not record.max_expert_bytes:
            continue
        key = record.incarnation
        both = len(after.get(key, set()) | before.get(key, set()))
        if both * record.expert_bytes > record.max_expert_bytes:
            found.append(
                f"worker {record.worker_id} would hold {both * record.expert_bytes} bytes of "
                f"experts while it changes, its limit is {record.max_expert_bytes}"
            )
    return found


def _held(placement: Placement) -> Mapping[tuple[str, int], set[tuple[int, int]]]:
    held: dict[tuple[str, int], set[tuple[int, int]]] = {}
    for layer, by_worker in zip(placement.layers, placement.slots, strict=True):
        for worker, slots in zip(placement.workers, by_worker, strict=True):
            mine = held.setdefault(worker.incarnation, set())
            mine.update(
                (layer, placement.substitution.weights_id(expert, placement.num_own))
                for expert in slots
                if expert >= 0
            )
    return held
