"""Pins: orders of operators that a worker hold an expert."""

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from moesaic.messages.decisions import EVERY_LAYER, Pin
from moesaic.messages.placement import EMPTY_SLOT, Placement


def with_pins(placement: Placement, pins: Iterable[Pin]) -> Placement:
    """Put pinned experts where they are wanted.

    A pinned expert takes an empty slot of the worker, else the slot of the expert with most replicas.
    That expert must have another replica, and must not be pinned there itself. Without such a slot the
    pin stays unfulfilled; see ``unfulfilled``.
    """
    slots = [[list(worker) for worker in layer] for layer in placement.slots]
    wanted = _wanted(placement, pins)
    pinned: dict[tuple[int, int], set[int]] = {}
    for layer_idx, worker_idx, expert in wanted:
        pinned.setdefault((layer_idx, worker_idx), set()).add(expert)
    for layer_idx, worker_idx, expert in wanted:
        held = slots[layer_idx][worker_idx]
        if expert not in held:
            slot = _slot_to_give(slots[layer_idx], worker_idx, pinned[layer_idx, worker_idx])
            if slot is not None:
                held[slot] = expert
    return replace(placement, slots=slots)


def unfulfilled(placement: Placement, pins: Iterable[Pin]) -> list[str]:
    """A sentence for people about each pin that a placement does not meet."""
    names = [worker.worker_id for worker in placement.workers]
    pins = list(pins)
    found = [
        f"worker {pin.worker_id} is not placed, and expert {pin.expert} is pinned to it"
        for pin in pins
        if pin.worker_id not in names
    ]
    return found + [
        f"worker {names[worker_idx]} has no slot of layer {placement.layers[layer_idx]}, or no "
        f"memory, to give to expert {expert}, which is pinned to it"
        for layer_idx, worker_idx, expert in _wanted(placement, pins)
        if expert not in placement.slots[layer_idx][worker_idx]
    ]


def _wanted(placement: Placement, pins: Iterable[Pin]) -> list[tuple[int, int, int]]:
    """Layer index, worker index and expert of every pin that can be met at all."""
    names = [worker.worker_id for worker in placement.workers]
    return [
        (layer_idx, names.index(pin.worker_id), pin.expert)
        for pin in pins
        if pin.worker_id in names and 0 <= pin.expert < placement.num_own
        for layer_idx, layer in enumerate(placement.layers)
        if pin.layer in (layer, EVERY_LAYER)
    ]


def _slot_to_give(layer: Sequence[Sequence[int]], worker_idx: int, kept: set[int]) -> int | None:
    held = layer[worker_idx]
    if EMPTY_SLOT in held:
        return list(held).index(EMPTY_SLOT)
    replicas = {expert: sum(expert in slots for slots in layer) for expert in held}
    spare = [e for e in held if replicas[e] > 1 and e not in kept]
    if not spare:
        return None
    return list(held).index(max(spare, key=lambda expert: (replicas[expert], -expert)))
