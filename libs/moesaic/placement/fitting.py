"""What of a wish may be had: layer by layer, where not everything is possible at once."""

from collections.abc import Sequence

from msgspec.structs import replace

from moesaic.messages.placement import Placement
from moesaic.messages.registry import WorkerRecord
from moesaic.placement.checking import violations


def fitting(
    base: Placement,
    wanted: Placement,
    records: Sequence[WorkerRecord],
    current: Placement | None,
) -> Placement:
    """``wanted``; or, if it breaks a rule, ``base`` with as many layers of ``wanted`` as break none.

    Args:
        base: what is to be had in any case; of the same workers and layers as ``wanted``.
        wanted: for which, mostly, memory lacks the room while old experts stay.
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
