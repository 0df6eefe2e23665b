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
    """Keep ``wanted``, or, if it breaks a rule, ``base`` with as many of its layers as break none.

    The usual reason is memory: old experts still take their room.

    Args:
        base: a placement that breaks no rule, of the same workers and layers as ``wanted``.
        wanted: the placement to come near to.
        records: records of the workers.
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
