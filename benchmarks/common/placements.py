"""The one maker of placements for benchmarks and tests: workers, and the experts that each holds."""

from collections.abc import Iterable, Sequence
from typing import Any

from moesaic.messages.placement import PlacedWorker, Placement


def placed_worker(worker_id: str, data_address: str = "", **fields: Any) -> PlacedWorker:
    """Make a worker of a placement; ``fields`` are of ``PlacedWorker``, its generation is 1."""
    usual: dict[str, Any] = {"generation": 1, "admin_address": ""}
    return PlacedWorker(worker_id=worker_id, data_address=data_address, **{**usual, **fields})


def placement_of(
    workers: Iterable[PlacedWorker | str],
    slots: Sequence[Sequence[int]],
    layers: Iterable[int],
    num_experts: int,
    **fields: Any,
) -> Placement:
    """Make a placement with the same slots in all layers.

    Args:
        workers: or their names.
        slots: experts of each worker, -1 for an empty slot.
        layers: layers of the decoder that have experts.
        num_experts: experts of a layer.
        fields: fields of ``Placement``; its epoch is 1, its model has the digest ``m``.
    """
    numbers = list(layers)
    usual: dict[str, Any] = {
        "epoch": 1,
        "model_digest": "m",
        "slots": [[list(held) for held in slots] for _ in numbers],
    }
    return Placement(
        workers=[placed_worker(each) if isinstance(each, str) else each for each in workers],
        layers=numbers,
        num_experts=num_experts,
        **{**usual, **fields},
    )
