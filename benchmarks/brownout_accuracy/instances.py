"""Experts that the busiest of four workers computes, which the rule ``instances`` is to lower.

A layer takes as long as that worker if memory is what it waits for. Counted on recorded routing of the demo model,
in the batches in which it ran, after the split and with replicas chosen as expert workers choose them. Experts are
placed by their popularity in one half of the recorded steps; those of the other half are counted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.aebs.routing import SHAPES, Rows, batches_of, drawn_layer, placed
from benchmarks.common.placements import placed_worker
from benchmarks.common.routing_traces import KINDS, demo_trace
from moesaic.brownout.split import Level
from moesaic.dispatch.substitution import LoadedSubstitution
from moesaic.kernels.brownout import split_choices
from moesaic.kernels.promised import LayerSubstitution, PromisedRows
from moesaic.messages.placement import Placement
from moesaic.messages.substitution import Substitution
from moesaic.placement.decide.stand_ins import with_substitution
from moesaic.placement.schedule.aebs import replica_table
from moesaic.placement.schedule.serving import activated_experts
from moesaic_lab.placement.trace_report import evenly, halves
from moesaic_lab.scheduling.policies import SCHEDULES

NUM_WORKERS = 4
STEPS = 200  # of each kind, evenly spaced
DRAWN_ROWS, DRAWN_BATCHES = 4000, 200


@dataclass(frozen=True)
class Busiest:
    """Means over batches and layers.

    Attributes:
        experts: that the worker with most of them computes, united ones included.
        degraded: share of choices.
    """

    experts: float
    degraded: float


class PlacedWorkers:
    """Workers with equal parts of the experts of every layer, and no replicas."""

    def __init__(self, rows_by_layer: Mapping[int, Rows], num_experts: int, workers: int) -> None:
        """Place by the popularity of experts in some rows of each layer."""
        slots = []
        for rows in rows_by_layer.values():
            table = placed(rows, num_experts, (workers, -(-num_experts // workers)))
            slots.append([np.flatnonzero(table[:, n] >= 0).tolist() for n in range(workers)])
        worker = placed_worker("")
        self._placement = Placement(
            epoch=1,
            model_digest="",
            num_experts=num_experts,
            workers=[worker] * workers,
            layers=list(rows_by_layer),
            slots=slots,
        )

    @property
    def homes(self) -> dict[int, torch.Tensor]:
        """The worker of each expert, int32 ``[E]``, by layer."""
        return {
            layer: torch.tensor([holders[0] for holders in self._placement.holders(layer)]).int()
            for layer in self._placement.layers
        }

    def busiest(
        self,
        batches: Mapping[int, Sequence[NDArray[np.integer]]],
        layers: Mapping[int, LayerSubstitution],
        threshold: float,
    ) -> Busiest:
        """Split the choices of batches of each layer, and count."""
        substitution = next(iter(layers.values())).substitution
        placement = with_substitution(self._placement, substitution)
        experts: list[int] = []
        degraded: list[float] = []
        for slots, layer in zip(placement.slots, placement.layers, strict=True):
            replicas = replica_table(slots, placement.num_experts)
            for topk_ids in batches[layer]:
                ids, share = _split(topk_ids, layers[layer], threshold)
                degraded.append(share)
                experts.append(_most(ids, replicas))
        return Busiest(fmean(experts), fmean(degraded))


class DemoFleet:
    """The demo model's experts on four workers, and recorded steps."""

    def __init__(self) -> None:
        """Place by the first half of the steps, and keep some of the second."""
        trace = demo_trace()
        counted, _ = halves(trace, [phase for phases in KINDS.values() for phase in phases])
        rows = {
            layer: np.concatenate([step.topk_ids[index] for step in counted]).astype(np.int64)
            for index, layer in enumerate(trace.layers)
        }
        self.fleet = PlacedWorkers(rows, trace.num_experts, NUM_WORKERS)
        self._batches = {}
        for kind, phases in KINDS.items():
            steps = evenly(halves(trace, phases)[1], STEPS)
            self._batches[kind] = {
                layer: [step.topk_ids[index] for step in steps]
                for index, layer in enumerate(trace.layers)
            }

    def most_activated(
        self, substitutions: Mapping[str, LoadedSubstitution], thresholds: Sequence[float]
    ) -> dict[str, dict[str, list[Busiest]]]:
        """Count for some substitutions at threshold 1 and the others, by kind of step."""
        return {
            kind: {
                name: [self.fleet.busiest(own, loaded.layers, t) for t in (1.0, *thresholds)]
                for name, loaded in substitutions.items()
            }
            for kind, own in self._batches.items()
        }


def drawn(thresholds: Sequence[float]) -> dict[str, dict[str, list[Busiest]]]:
    """Count in drawn batches of 32 rows of a layer of Qwen3-235B's shape, by fleet and way, and then by rule."""
    shape, found = SHAPES["qwen3-235b"], {}
    for workers in (8, 16):
        rng = np.random.default_rng(workers)
        rows = drawn_layer(shape, 2 * DRAWN_ROWS, rng)
        fleet = PlacedWorkers({0: rows[:DRAWN_ROWS]}, shape.num_experts, workers)
        batches = {0: list(batches_of(rows[DRAWN_ROWS:], 32, DRAWN_BATCHES, rng))}
        for way in (4, 8):
            substitution = Substitution(way=way, instead="united")
            rules = {"tokens": None, "instances": fleet.homes[0]}
            found[f"{workers} workers, way {way}"] = {
                rule: [
                    fleet.busiest(
                        batches,
                        {0: LayerSubstitution(shape.num_experts, substitution, homes=homes)},
                        t,
                    )
                    for t in (1.0, *thresholds)
                ]
                for rule, homes in rules.items()
            }
    return found


def _split(
    topk_ids: NDArray[np.integer], layer: LayerSubstitution, threshold: float
) -> tuple[NDArray[np.int64], float]:
    ids = torch.from_numpy(topk_ids.astype(np.int32, order="C"))
    promised = PromisedRows([Level(threshold)], [0] * len(ids))
    split_choices(ids, torch.ones(ids.shape), promised, layer)
    return ids.numpy().astype(np.int64), float(promised.settle().sum()) / ids.numel()


def _most(ids: NDArray[np.int64], replicas: NDArray[np.int32]) -> int:
    chosen = ids[ids >= 0][:, None]
    served = SCHEDULES["aebs"](chosen, replicas, np.random.default_rng(0))
    return int(activated_experts(chosen, served, *replicas.shape).max())
