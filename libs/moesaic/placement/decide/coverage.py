"""Coverage: the experts that no live worker holds."""

from collections.abc import Set

from moesaic.messages.placement import Placement


def missing_experts(placement: Placement, live: Set[tuple[str, int]]) -> dict[int, list[int]]:
    """The experts that no live worker holds, per decoder layer; layers that lack none are left out.

    Args:
        placement: the committed placement.
        live: (worker id, generation) of the workers that live. A worker that restarted has
            another generation and holds nothing of the placement.
    """
    lives = [(worker.worker_id, worker.generation) in live for worker in placement.workers]
    missing = {}
    for layer in placement.layers:
        lost = [
            expert
            for expert, holders in enumerate(placement.holders(layer))
            if not any(lives[worker_idx] for worker_idx in holders)
        ]
        if lost:
            missing[layer] = lost
    return missing
