"""Even spreading of experts over slots, at first and when workers came or went.

A worker holds an expert at most once per layer; slots that no expert can take stay empty (-1).
Both functions are deterministic, so that two schedulers with the same facts agree.
"""

from collections import Counter
from collections.abc import Sequence

from moesaic.errors import PlacementInfeasible
from moesaic.messages.placement import EMPTY_SLOT

Slots = list[list[int]]  # [N][slots]: the expert in each slot of each worker, for one layer


def uniform(num_experts: int, num_layers: int, slots: Sequence[int]) -> list[Slots]:
    """Deal the experts round and round until all slots are filled.

    Every expert gets a replica, and the numbers of replicas differ by at most one.

    Args:
        num_experts: experts per layer, E.
        num_layers: layers with experts, L.
        slots: slots per layer of each worker, ``[N]``.

    Returns:
        ``[L][N][slots[n]]`` expert ids.

    Raises:
        PlacementInfeasible: the slots cannot hold every expert; names the shortfall over all
            layers.
    """
    require_room(num_experts, num_layers, slots)
    layer: Slots = []
    next_expert = 0
    for num_slots in slots:
        taken = min(num_slots, num_experts)
        dealt = [(next_expert + i) % num_experts for i in range(taken)]
        layer.append(dealt + [EMPTY_SLOT] * (num_slots - taken))
        next_expert += taken
    return [[list(worker) for worker in layer] for _ in range(num_layers)]


def refill(num_experts: int, held: Sequence[Slots]) -> list[Slots]:
    """Complete what is held, moving as little as possible.

    Experts without a replica take empty slots first, then slots of the most replicated experts.
    Slots that are still empty get the least replicated experts. Everything else stays.

    Args:
        num_experts: experts per layer, E.
        held: ``[L][N][slots]``, experts that the workers hold; -1 is empty. Not changed.

    Returns:
        The complete slots, in the same shape.

    Raises:
        PlacementInfeasible: the slots cannot hold every expert.
    """
    if held:
        require_room(num_experts, len(held), [len(worker) for worker in held[0]])
    return [_refill_layer(num_experts, [list(worker) for worker in layer]) for layer in held]


def require_room(num_experts: int, num_layers: int, slots: Sequence[int]) -> None:
    """Refuse slots that cannot hold every expert of every layer.

    Raises:
        PlacementInfeasible: names the shortfall over all layers.
    """
    missing = num_experts - sum(min(num_slots, num_experts) for num_slots in slots)
    if missing > 0:
        raise PlacementInfeasible(missing * num_layers, 0)


def _refill_layer(num_experts: int, layer: Slots) -> Slots:
    replicas = Counter({expert: 0 for expert in range(num_experts)})
    replicas.update(expert for worker in layer for expert in worker if expert != EMPTY_SLOT)
    for expert in range(num_experts):
        if replicas[expert] == 0:
            worker, slot = _roomiest(layer) or _most_replicated(layer, replicas)
            if (evicted := layer[worker][slot]) != EMPTY_SLOT:
                replicas[evicted] -= 1
            layer[worker][slot] = expert
            replicas[expert] = 1
    for experts in layer:
        for slot in (slot for slot, expert in enumerate(experts) if expert == EMPTY_SLOT):
            if absent := set(replicas) - set(experts):
                experts[slot] = min(absent, key=lambda expert: (replicas[expert], expert))
                replicas[experts[slot]] += 1
    return layer


def _roomiest(layer: Slots) -> tuple[int, int] | None:
    """The first empty slot of the worker that has most of them."""
    worker = max(range(len(layer)), key=lambda n: (layer[n].count(EMPTY_SLOT), -n))
    return (worker, layer[worker].index(EMPTY_SLOT)) if EMPTY_SLOT in layer[worker] else None


def _most_replicated(layer: Slots, replicas: Counter[int]) -> tuple[int, int]:
    """A slot of the expert with most replicas: at least two, if all slots are full."""
    places = [(worker, slot) for worker in range(len(layer)) for slot in range(len(layer[worker]))]
    return max(places, key=lambda place: (replicas[layer[place[0]][place[1]]], place))
