"""Compromises: as many layers of a wanted placement as break no rule."""

from collections.abc import Sequence

from msgspec.structs import replace

from moesaic.messages.placement import Placement
from moesaic.messages.registry import WorkerRecord
from moesaic.placement.decide.checking import violations


def fitting(
    base: Placement,
    wanted: Placement,
    records: Sequence[WorkerRecord],
    current: Placement | None,
) -> Placement:
    """Keep ``wanted``, or, if it breaks a rule, ``base`` with as many layers of it as break none.

    Mostly it is memory that lacks the room while old experts stay.

    Args:
        base: breaks no rule; of the same workers and layers as ``wanted``.
        wanted: the placement to come near to.
        records: the workers there are.
        current: the placement in force.
    """
    if not violations(wanted, records, current):
        return wanted
    found = base
    for idx, layer in enumerate(wanted.slots):
        if layer != found.slots[idx]:
            slots = [*found.slots[:idx], layer, *found.slots[idx + 1 :]]
            with_layer = replace(base, slots=slots)
            if not violations(with_layer, records, current):
                found = with_layer
    return found
