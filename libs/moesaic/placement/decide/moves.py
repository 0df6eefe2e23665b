"""Moves: experts that workers must load for one placement to become another."""

from dataclasses import dataclass

from moesaic.messages.placement import EMPTY_SLOT, Placement


@dataclass(frozen=True, order=True)
class Move:
    """A worker must load an expert that it does not hold."""

    layer: int
    expert: int
    worker_id: str


def moves(current: Placement | None, target: Placement) -> list[Move]:
    """Experts that workers lack of ``target``, by layer, expert and worker id.

    A worker that has restarted since ``current`` holds none of its experts.
    """
    held = residents(current) if current else set()
    needed = residents(target)
    return sorted(Move(layer, expert, worker) for layer, expert, (worker, _) in needed - held)


def freed(current: Placement, target: Placement) -> list[Move]:
    """Experts that workers no longer need under ``target``, by layer, expert and worker id."""
    return [
        Move(layer, expert, worker)
        for layer, expert, (worker, _) in sorted(residents(current) - residents(target))
    ]


def residents(placement: Placement) -> set[tuple[int, int, tuple[str, int]]]:
    """Every replica as layer, expert and incarnation of its worker."""
    incarnations = [worker.incarnation for worker in placement.workers]
    return {
        (layer, expert, incarnation)
        for layer, by_worker in zip(placement.layers, placement.slots, strict=True)
        for incarnation, experts in zip(incarnations, by_worker, strict=True)
        for expert in experts
        if expert != EMPTY_SLOT
    }
