"""United experts in a placement: behind each worker's own slots, apart from the experts of their group.

Policies place a model's own experts; united ones are added to the result. If a worker dies, each of its
experts should keep a stand-in. So every expert with a single holder has its united expert on another
worker, if there is another.
"""

from msgspec.structs import replace

from moesaic.messages.placement import Placement
from moesaic.messages.substitution import Substitution

PLAIN = Substitution()


def own_part(placement: Placement) -> Placement:
    """Leave out united experts."""
    if not placement.num_united:
        return (
            placement if placement.substitution == PLAIN else replace(placement, substitution=PLAIN)
        )
    slots = [
        [[expert for expert in held if expert < placement.num_own] for held in layer]
        for layer in placement.slots
    ]
    return replace(
        placement, num_experts=placement.num_own, slots=slots, substitution=PLAIN, num_united=0
    )


def with_substitution(placement: Placement, substitution: Substitution) -> Placement:
    """Let ``substitution`` degrade the choices of a placement, with its united experts in slots of their own.

    Each united expert takes the workers that have fewest of them in the layer; ties go to the first. It takes
    one worker, or two if its experts have single holders on several.
    """
    own = own_part(placement)
    if substitution.instead != "united":
        return replace(own, substitution=substitution)
    num_united = substitution.num_united(own.num_experts)
    return replace(
        own,
        num_experts=own.num_experts + num_united,
        num_united=num_united,
        substitution=substitution,
        slots=[_with_united(layer, own.num_experts, substitution) for layer in own.slots],
    )


def _with_united(
    layer: list[list[int]], num_own: int, substitution: Substitution
) -> list[list[int]]:
    holders: list[list[int]] = [[] for _ in range(num_own)]
    for worker, held in enumerate(layer):
        for expert in set(held) - {-1}:
            holders[expert].append(worker)
    slots, given = [list(held) for held in layer], [0] * len(layer)
    for group in range(substitution.num_united(num_own)):
        own = holders[group * substitution.way : (group + 1) * substitution.way]
        alone = {workers[0] for workers in own if len(workers) == 1}
        others = [worker for worker in range(len(layer)) if alone != {worker}] or [0]
        least = sorted(others, key=lambda worker: (given[worker], worker))
        for worker in least[: 2 if len(alone) > 1 else 1]:
            slots[worker].append(num_own + group)
            given[worker] += 1
    return slots
