"""Experts onto the devices of one edge server: largest first, each on the first device with room.

With experts of one size that packs as many as can be. Where sizes differ, a rare few that would fit
in another order do not; policies then place fewer, never more than fit.
"""

from collections.abc import Sequence

from moesaic.errors import InvalidInput, PlacementInfeasible
from moesaic.messages.placement import EMPTY_SLOT
from moesaic.placement.policies.problem import PlacementProblem
from moesaic.placement.policies.uniform import Slots


def fitted(counts: Sequence[int], sizes: Sequence[int], devices: Sequence[int]) -> list[int]:
    """Count the experts of each layer that find a place.

    Args:
        counts: experts wanted of each layer, ``[L]``.
        sizes: bytes of one expert of each layer, ``[L]``.
        devices: bytes of each device.

    Returns:
        At most ``counts``, ``[L]``; of these all find a place.
    """
    free, placed = list(devices), [0] * len(sizes)
    for layer_idx in _largest_first(sizes):
        for device, room in enumerate(free):
            taken = min(counts[layer_idx] - placed[layer_idx], room // sizes[layer_idx])
            placed[layer_idx] += taken
            free[device] -= taken * sizes[layer_idx]
    return placed


def pack_devices(placed: list[Slots], problem: PlacementProblem) -> list[list[list[int]]]:
    """Choose a device for every expert that an instance holds.

    Args:
        placed: ``[L][N][slots]``, as policies return it.
        problem: that it was placed for, with memory.

    Returns:
        ``[L][N][slots]``: the index of the device in the instance's memory, -1 for an empty slot.

    Raises:
        InvalidInput: the problem has no memory.
        PlacementInfeasible: names the experts that found no place, and their bytes.
    """
    if problem.memory is None:
        raise InvalidInput("memory", "is needed to choose devices")
    chosen = [[[EMPTY_SLOT] * len(experts) for experts in layer] for layer in placed]
    homeless: list[int] = []  # bytes of each
    for n, devices in enumerate(problem.memory):
        free = list(devices)
        for layer_idx in _largest_first(problem.sizes):
            size = problem.sizes[layer_idx]
            for slot, expert in enumerate(placed[layer_idx][n]):
                if expert == EMPTY_SLOT:
                    continue
                device = next((d for d, room in enumerate(free) if room >= size), None)
                if device is None:
                    homeless.append(size)
                    continue
                free[device] -= size
                chosen[layer_idx][n][slot] = device
    if homeless:
        raise PlacementInfeasible(len(homeless), sum(homeless))
    return chosen


def _largest_first(sizes: Sequence[int]) -> list[int]:
    return sorted(range(len(sizes)), key=lambda layer_idx: -sizes[layer_idx])
