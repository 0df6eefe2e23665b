"""The map of experts: holders by the placement, loads by the scheduler's record of traffic. Pure."""

from typing import NamedTuple

from moesaic.messages.placement import EMPTY_SLOT, Placement
from moesaic.services.gateway.console.state import ExpertMap
from moesaic.v1.scheduler_pb2 import SchedulerServiceGetActivationsResponse


def expert_map(
    placement: Placement | None, activations: SchedulerServiceGetActivationsResponse | None
) -> ExpertMap:
    """Join a placement with the traffic of its model."""
    if placement is None:
        return ExpertMap(
            epoch=0, layers=[], num_experts=0, num_united=0, workers=[], holders=[], share=[]
        )
    rows = {each.layer: list(each.tokens) for each in activations.layers} if activations else {}
    return ExpertMap(
        epoch=placement.epoch,
        layers=placement.layers,
        num_experts=placement.num_experts,
        num_united=placement.num_united,
        workers=[worker.worker_id for worker in placement.workers],
        holders=[placement.holders(layer) for layer in placement.layers],
        share=[_shares(rows.get(layer, []), placement.num_experts) for layer in placement.layers],
    )


def _shares(rows: list[float], num_experts: int) -> list[float]:
    total = sum(rows)
    if not total:
        return []
    told = [round(each / total, 5) for each in rows[:num_experts]]
    return told + [0.0] * (num_experts - len(told))


class HeldExperts(NamedTuple):
    """The experts of one worker.

    Attributes:
        replicas: number of replicas, over all layers.
        layers: number of layers that they are of.
    """

    replicas: int
    layers: int


NOTHING_HELD = HeldExperts(0, 0)


def held_by_workers(placement: Placement | None) -> dict[str, HeldExperts]:
    """Count the replicas of each worker."""
    if placement is None:
        return {}
    counts = [
        [sum(expert != EMPTY_SLOT for expert in slots) for slots in by_worker]
        for by_worker in placement.slots
    ]
    return {
        worker.worker_id: HeldExperts(sum(of_layers), sum(map(bool, of_layers)))
        for worker, *of_layers in zip(placement.workers, *counts, strict=True)
    }


def shares_of_workers(experts: ExpertMap) -> dict[str, float]:
    """Give each worker's share of all rows, if the replicas of an expert have equal parts of its rows."""
    totals, num_layers = [0.0] * len(experts.workers), 0
    for holders, shares in zip(experts.holders, experts.share, strict=True):
        num_layers += bool(shares)
        for held_by, share in zip(holders, shares, strict=False):
            for worker in held_by:
                totals[worker] += share / len(held_by)
    if not num_layers:
        return {}
    return {
        name: round(total / num_layers, 4)
        for name, total in zip(experts.workers, totals, strict=True)
    }
