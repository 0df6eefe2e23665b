"""United experts in a placement: behind each worker's own slots, apart from the experts of their group.

Policies place a model's own experts; united ones are added to the result. If a worker dies, each of its
experts should keep a stand-in. So every expert with a single holder has its united expert on another
worker, if there is another.
"""

from msgspec.structs import replace

from moesaic.messages.placement import Placement
from moesaic.messages.rung import Rung

PLAIN = Rung()


def own_part(placement: Placement) -> Placement:
    """Leave out united experts."""
    if not placement.num_united:
        return placement if placement.rung == PLAIN else replace(placement, rung=PLAIN)
    slots = [
        [[expert for expert in held if expert < placement.num_own] for held in layer]
        for layer in placement.slots
    ]
    return replace(placement, num_experts=placement.num_own, slots=slots, rung=PLAIN, num_united=0)


def with_rung(placement: Placement, rung: Rung) -> Placement:
    """Let ``rung`` degrade the choices of a placement, with its united experts in slots of their own.

    Each united expert takes the workers that have fewest of them in the layer; ties go to the first. It takes
    one worker, or two if its experts have single holders on several.
    """
    own = own_part(placement)
    if rung.instead != "united":
        return replace(own, rung=rung)
    num_united = rung.num_united(own.num_experts)
    return replace(
        own,
        num_experts=own.num_experts + num_united,
        num_united=num_united,
        rung=rung,
        slots=[_with_united(layer, own.num_experts, rung) for layer in own.slots],
    )


def _with_united(layer: list[list[int]], num_own: int, rung: Rung) -> list[list[int]]:
    holders: list[list[int]] = [[] for _ in range(num_own)]
    for worker, held in enumerate(layer):
        for expert in set(held) - {-1}:
            holders[expert].append(worker)
    slots, given = [list(held) for held in layer], [0] * len(layer)
    for group in range(rung.num_united(num_own)):
        own = holders[group * rung.way : (group + 1) * rung.way]
        alone = {workers[0] for workers in own if len(workers) == 1}
        others = [worker for worker in range(len(layer)) if alone != {worker}] or [0]
        least = sorted(others, key=lambda worker: (given[worker], worker))
        for worker in least[: 2 if len(alone) > 1 else 1]:
            slots[worker].append(num_own + group)
            given[worker] += 1
    return slots
