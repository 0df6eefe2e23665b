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
    lives = [worker.incarnation in live for worker in placement.workers]
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


def unserved_experts(placement: Placement, live: Set[tuple[str, int]]) -> dict[int, list[int]]:
    """Find the model's experts that no live worker can serve, neither exactly nor by a united expert.

    Args:
        placement: the committed placement.
        live: (worker id, generation) of the workers that live.

    Returns:
        Experts per decoder layer; layers that lack none are left out.
    """
    num_own, way = placement.num_own, placement.substitution.way
    unserved = {}
    for layer, experts in missing_experts(placement, live).items():
        lost = [
            expert
            for expert in experts
            if expert < num_own and (not placement.num_united or num_own + expert // way in experts)
        ]
        if lost:
            unserved[layer] = lost
    return unserved
